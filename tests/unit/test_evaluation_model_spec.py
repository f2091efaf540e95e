"""Specs of models under evaluation: what they embed, how they are named, what they refuse."""

import json
import pickle
import shutil

import mteb
import numpy as np
import pytest
import torch
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.models.abs_encoder import get_prompt
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.types import PromptType
from plain_spec_model import PlainSpecModel, check_with_mock_tasks, few_experiments
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tiny_models import save_cross_encoder, save_decoder, save_encoder, save_nomic

from rayembed.config.backbone import BackboneConfig, MeanPooling
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.prompts_table import format_prompts, prompts_record, prompts_table
from rayembed.evaluation.rayembed_spec import name_of
from rayembed.evaluation.run_scores import loader_of, make_spec
from rayembed.evaluation.task_text import task_metadata, task_text
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import check_weight_files
from rayembed.models.loading.load import load_model
from rayembed.models.loading.saved_prompts import SYMMETRIC_TYPES
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode

TEXTS = [
    "Paris",
    "",
    "are cats larger than dogs and where do they live",
    "the quick brown fox jumps over the lazy dog " * 6,
    "7 wonders",
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:mteb"),
    pytest.mark.filterwarnings("ignore:Model prompts specified"),
    pytest.mark.filterwarnings("ignore:The `get_sentence_embedding_dimension`"),
    pytest.mark.filterwarnings("ignore:The fill_missing parameter"),
    pytest.mark.filterwarnings("ignore:SentenceTransformers that use prompts"),
    pytest.mark.filterwarnings("ignore:Task name passage is not valid"),
]
QUERY, DOCUMENT = PromptType.query, PromptType.document
SCIFACT = mteb.get_task("SciFact").metadata
STS = mteb.get_task("STS12").metadata
EXACT = 2e-6
"""Of unit vectors in fp32: micro-batches of other shapes sum in another order."""


def spec_of(reference, **settings):
    return make_spec(parse(ModelUnderTest, {"reference": str(reference), **settings}))


@pytest.fixture(scope="module")
def nvembed(tmp_path_factory):
    """A saved NV-Embed of width 32."""
    folder = tmp_path_factory.mktemp("nvembed")
    save_decoder(folder / "backbone", "mistral", sliding_window=None)
    config = NVEmbedConfig(
        backbone=BackboneConfig(path="none", dtype="float32"),
        pooling=MeanPooling(),
        lora=None,
        query_max_length=64,
        document_max_length=100,
    )
    build_model(config, folder / "backbone", seed=0).save(
        folder / "run" / "model", instructions={"OwnTask": "find own things"}
    )
    return folder / "run" / "model"


@pytest.fixture(scope="module")
def biencoder(tmp_path_factory):
    """A saved bi-encoder of width 32 with prefixes."""
    folder = tmp_path_factory.mktemp("biencoder")
    save_encoder(folder / "backbone")
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="none", dtype="float32"),
        query_prefix="query: ",
        document_prefix="passage: ",
        query_max_length=40,
        document_max_length=60,
    )
    build_model(config, folder / "backbone", seed=0).save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory):
    """A folder of sentence-transformers with prompts by task, type and side."""
    folder = tmp_path_factory.mktemp("sentence")
    save_encoder(folder / "bert")
    transformer = Transformer(str(folder / "bert"), max_seq_length=48)
    prompts = {
        "query": "query: ",
        "document": "passage: ",
        "STS": "the same: ",
        "SciFact-query": "claim: ",
    }
    model = SentenceTransformer(
        modules=[transformer, Pooling(32, "mean"), Normalize()], prompts=prompts, device="cpu"
    )
    model.save(str(folder / "model"))
    return folder / "model"


class FolderWrapper(SentenceTransformerEncoderWrapper):
    """mteb's wrapper of a folder, found by a name that looks like the hub's."""

    folder = ""

    def __init__(self, model, revision=None, device=None, **options):
        super().__init__(self.folder, device=device, **options)


@pytest.fixture
def registered(sentence_folder, monkeypatch):
    """A model that mteb knows by name."""
    monkeypatch.setattr(FolderWrapper, "folder", str(sentence_folder))
    meta = ModelMeta.create_empty(
        {
            "name": "made-up/peer",
            "revision": "r1",
            "loader": FolderWrapper,
            "loader_kwargs": {"model_prompts": {"query": "ask: ", "STS": "alike: "}},
            "embed_dim": [32, 16],
        }
    )
    monkeypatch.setitem(MODEL_REGISTRY, "made-up/peer", meta)
    return meta


def test_nvembed_puts_instructions_before_queries_and_keeps_them_out_of_the_pool(nvembed):
    spec = pickle.loads(pickle.dumps(spec_of(nvembed)))
    assert spec.encode_spec(SCIFACT, DOCUMENT) == EncodeSpec("document")
    encode_spec = spec.encode_spec(SCIFACT, QUERY)
    assert encode_spec == EncodeSpec("query", SCIFACT.prompt["query"])
    assert spec.shown(encode_spec) == f"Instruct: {SCIFACT.prompt['query']}\nQuery: "
    assert spec.encode_spec(STS, None) == EncodeSpec("query", "Retrieve semantically similar text.")
    embed = spec.load("cpu")
    model = load_model(nvembed)
    for asked in (encode_spec, spec.encode_spec(SCIFACT, DOCUMENT)):
        expected = encode(
            model, TEXTS, role=asked.role, instruction=asked.instruction, allow_empty=True
        )
        np.testing.assert_allclose(embed(TEXTS, asked), expected, atol=EXACT)
    # By hand: the same tokens, the mean over those behind the instruction.
    ids, mask = _tokens_by_hand(model, encode_spec.instruction, TEXTS[2])
    with torch.inference_mode():
        states = model.backbone(
            input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]
        ).last_hidden_state[0]
    mean = states[mask].mean(dim=0)
    found = embed([TEXTS[2]], encode_spec)[0]
    np.testing.assert_allclose(found, (mean / mean.norm()).numpy(), atol=EXACT)
    # Control: pooled over the instruction, too, it is another vector.
    whole = states.mean(dim=0)
    assert np.abs(found - (whole / whole.norm()).numpy()).max() > 1e-3


def _tokens_by_hand(model, instruction, text):
    backend = model.tokenizer.pretrained
    head = f"Instruct: {instruction}\nQuery: "
    encoded = backend(head + text, add_special_tokens=False, return_offsets_mapping=True)
    ids = [1, *encoded["input_ids"], 2]
    pooled = [False, *(end > len(head) for _, end in encoded["offset_mapping"]), True]
    assert len(ids) <= 64
    return torch.tensor(ids), torch.tensor(pooled)


def test_a_biencoder_puts_literal_prompts_before_texts(biencoder):
    spec = spec_of(biencoder)
    assert spec.encode_spec(SCIFACT, QUERY) == EncodeSpec("query", "query: ")
    assert spec.encode_spec(SCIFACT, DOCUMENT) == EncodeSpec("document", "passage: ")
    assert spec.encode_spec(STS, None) == EncodeSpec("query", "query: ")
    embed, model = spec.load("cpu"), load_model(biencoder)
    for encode_spec in (spec.encode_spec(SCIFACT, QUERY), spec.encode_spec(SCIFACT, DOCUMENT)):
        expected = encode(model, TEXTS, role=encode_spec.role, allow_empty=True)
        np.testing.assert_allclose(embed(TEXTS, encode_spec), expected, atol=EXACT)
    # "q:" gets no space that it has not.
    other = spec_of(biencoder, prompts={"query_prefix": "q:", "document_prefix": ""})
    found = other.load("cpu")(TEXTS[2:], other.encode_spec(SCIFACT, QUERY))
    model.tokenizer.prefixes = {"query": "q:", "document": ""}
    np.testing.assert_allclose(found, encode(model, TEXTS[2:], role="query"), atol=EXACT)


def test_a_folder_of_sentence_transformers_scores_as_with_mteb(sentence_folder):
    """The mock tasks of all kinds, loaded by rayembed and by sentence-transformers itself."""
    plain = SentenceTransformerEncoderWrapper(SentenceTransformer(str(sentence_folder)))
    theirs = seeded_mock_run(plain)
    ran = {name for name, result in theirs.items() if isinstance(result, mteb.TaskResult)}
    assert len(ran) >= 15
    for prefix in ("", "st:"):
        ours = seeded_mock_run(PlainSpecModel(spec_of(f"{prefix}{sentence_folder}")))
        for name in ran:
            assert isinstance(ours[name], mteb.TaskResult), (name, ours[name])
            assert _scores(ours[name]) == pytest.approx(_scores(theirs[name]), abs=1e-6), name


def save_plain(folder, defaults=None, **prefixes):
    """A bi-encoder that rayembed saves in the plain format of sentence-transformers.

    Args:
        defaults: instructions by role, of texts for which nobody names one.
    """
    save_encoder(folder / "backbone")
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="none", dtype="float32"),
        query_max_length=60,
        document_max_length=60,
        **prefixes,
    )
    told = {"SciFact": "check it:", "STS12": "alike?", "pairs": "find it:", "TERRa": "follows?"}
    model = build_model(config, folder / "backbone", seed=0)
    model.default_instructions = defaults or {}
    model.save(folder / "model", instructions=told)
    return folder / "model"


PREFIXES = {"query_prefix": "query: ", "document_prefix": "passage: "}
DEFAULTS = {"query": "find it", "document": "of the world"}


@pytest.mark.parametrize("prefixes", [PREFIXES, {"query_prefix": "query: "}, {}])
@pytest.mark.parametrize("defaults", [{}, DEFAULTS, {"query": "find it"}])
@pytest.mark.filterwarnings("ignore:Task name pairs")
@pytest.mark.filterwarnings("ignore:Some prompts are not")
def test_plain_mteb_puts_the_same_before_the_texts_of_our_folders(tmp_path, prefixes, defaults):
    """All text tasks of mteb that have anything of their own, by type, side and name."""
    folder = save_plain(tmp_path, defaults, **prefixes)
    spec = spec_of(folder)
    plain = SentenceTransformerEncoderWrapper(SentenceTransformer(str(folder), device="cpu"))
    types = {metadata.type: metadata for metadata in _text_tasks()}
    assert set(SYMMETRIC_TYPES) <= set(types)
    named = [mteb.get_task(name).metadata for name in ("SciFact", "STS12", "TERRa", "STS13")]
    asked = [(metadata, side) for metadata in named for side in (QUERY, DOCUMENT, None)]
    asked += [(metadata, None) for kind, metadata in types.items() if kind in SYMMETRIC_TYPES]
    asked += [(metadata, side) for metadata in types.values() for side in (QUERY, DOCUMENT)]
    for metadata, side in asked:
        told = get_prompt(plain.model_prompts, metadata, side) or ""
        assert spec.shown(spec.encode_spec(metadata, side)) == told, (metadata.name, side)
    # Control: with the roles' prompts alone, texts of symmetric tasks have none.
    by_role = {role: plain.model_prompts[role] for role in ("query", "document")}
    bare = get_prompt(by_role, types["STS"], None) or ""
    assert (bare == spec.shown(spec.encode_spec(types["STS"], None))) == (not prefixes)


def _text_tasks():
    return [t.metadata for t in ALL_MOCK_TASK_TEST_GRID if t.metadata.modalities == ["text"]]


@pytest.mark.parametrize("defaults", [{}, DEFAULTS])
def test_plain_mteb_gives_the_scores_of_our_folders(tmp_path, defaults):
    """As whoever publishes a model finds them; the mock tasks of all kinds."""
    folder = save_plain(tmp_path, defaults, **PREFIXES)
    theirs = seeded_mock_run(SentenceTransformerEncoderWrapper(SentenceTransformer(str(folder))))
    ours = seeded_mock_run(PlainSpecModel(spec_of(folder)))
    ran = {name for name, result in theirs.items() if isinstance(result, mteb.TaskResult)}
    assert len(ran) >= 15
    for name in ran:
        assert _scores(ours[name]) == pytest.approx(_scores(theirs[name]), abs=1e-6), name


def seeded_mock_run(model):
    """Results by task. mteb keeps its mock tasks, which go on drawing where the last run ended."""
    for task in ALL_MOCK_TASK_TEST_GRID:
        fresh = type(task)()
        task.rng_state, task.np_rng = fresh.rng_state, fresh.np_rng
    with few_experiments():
        return mteb.mock_run(model).task_results


def _scores(result):
    return {
        (split, entry["hf_subset"]): entry["main_score"]
        for split, entries in result.scores.items()
        for entry in entries
    }


@pytest.mark.parametrize("prefix", ["", "st:"])
def test_vectors_of_a_folder_of_sentence_transformers(sentence_folder, prefix):
    spec = pickle.loads(pickle.dumps(spec_of(f"{prefix}{sentence_folder}")))
    embed = spec.load("cpu")
    plain = SentenceTransformerEncoderWrapper(SentenceTransformer(str(sentence_folder)))
    for metadata, side in ((SCIFACT, QUERY), (SCIFACT, DOCUMENT), (STS, None)):
        expected = plain.encode(
            _batches(TEXTS), task_metadata=metadata, hf_split="", hf_subset="", prompt_type=side
        )
        found = embed(TEXTS, spec.encode_spec(metadata, side))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=EXACT)
    shown = [spec.shown(spec.encode_spec(SCIFACT, side)) for side in (QUERY, DOCUMENT)]
    assert [*shown, spec.shown(spec.encode_spec(STS, None))] == [
        "claim: ",
        "passage: ",
        "the same: ",
    ]


def _batches(texts):
    from datasets import Dataset
    from torch.utils.data import DataLoader

    return DataLoader(Dataset.from_dict({"text": texts}), batch_size=2)


def test_a_prompt_called_passage_is_heeded_by_rayembed_alone(sentence_folder, tmp_path):
    """sentence-transformers 6 fills in an empty `document`, which goes before `passage`."""
    import shutil

    folder = shutil.copytree(sentence_folder, tmp_path / "model")
    path = folder / "config_sentence_transformers.json"
    stated = json.loads(path.read_text())
    stated["prompts"] = {"query": "query: ", "passage": "passage: "}
    path.write_text(json.dumps(stated))
    ours, theirs = spec_of(folder), spec_of(f"st:{folder}")
    assert ours.shown(ours.encode_spec(SCIFACT, DOCUMENT)) == "passage: "
    assert theirs.shown(theirs.encode_spec(SCIFACT, DOCUMENT)) == ""
    plain = SentenceTransformer(str(folder), device="cpu")
    found = theirs.load("cpu")(TEXTS, theirs.encode_spec(SCIFACT, DOCUMENT))
    np.testing.assert_allclose(found, plain.encode_document(TEXTS), atol=EXACT)


def test_a_model_of_mteb_has_its_wrappers_prompts(registered, sentence_folder):
    spec = pickle.loads(pickle.dumps(spec_of("made-up/peer")))
    assert spec.meta.name == "made-up/peer"
    assert spec.meta.revision == f"r1-{spec.meta.revision.removeprefix('r1-')}"
    assert len(spec.meta.revision) == len("r1-") + 8, "the hub's revision, and the settings"
    embed = spec.load("cpu")
    plain = SentenceTransformer(str(sentence_folder), device="cpu")
    for metadata, side, encode_with, prompt in (
        (SCIFACT, QUERY, plain.encode_query, "ask: "),
        (SCIFACT, DOCUMENT, plain.encode_document, ""),
        (STS, None, plain.encode, "alike: "),
    ):
        encode_spec = spec.encode_spec(metadata, side)
        assert (encode_spec.task, encode_spec.prompt_type) == (
            metadata.name,
            side.value if side else "",
        )
        plain.prompts = {"query": "ask: ", "document": "", "STS": "alike: "}
        expected = encode_with(TEXTS, prompt=prompt)
        np.testing.assert_allclose(embed(TEXTS, encode_spec), expected, atol=EXACT)
    assert "FolderWrapper" in spec.shown(spec.encode_spec(SCIFACT, QUERY))


def test_settings_of_a_model_of_mteb(registered):
    spec = spec_of("mteb:made-up/peer", dimensions=16, max_length=8, dtype="bfloat16", name="cut")
    assert spec.meta.name == "rayembed/cut"
    assert spec.meta.revision.startswith("r1-")
    assert spec.fingerprint != spec_of("made-up/peer").fingerprint
    vectors = spec.load("cpu")(TEXTS, spec.encode_spec(SCIFACT, QUERY))
    assert vectors.shape == (5, 16)
    whole = spec_of("made-up/peer").load("cpu")([TEXTS[3]], spec.encode_spec(SCIFACT, QUERY))
    again = spec.load("cpu")([TEXTS[3][:-40]], spec.encode_spec(SCIFACT, QUERY))
    np.testing.assert_array_equal(again[0], vectors[3])  # both are cut to the same 8 tokens
    assert np.abs(whole[0, :16] - vectors[3]).max() > 1e-3


def test_small_vectors_of_a_model_of_mteb(registered, sentence_folder, tmp_path):
    plain = spec_of("made-up/peer")
    spec = spec_of("made-up/peer", precision="binary", rescore={"candidates": 8})
    assert spec.meta.revision.startswith("r1-binary1-rescored8-int8-")
    assert spec.fingerprint == plain.fingerprint
    assert spec.conditions["rescored"] == "8 with int8"
    assert "precision" not in plain.conditions
    folder = tmp_path / "dot"
    shutil.copytree(sentence_folder, folder)
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings["similarity_fn_name"] = "dot"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert spec_of(f"st:{folder}").similarity == "dot"
    with pytest.raises(ConfigError, match=r"precision = 'int8' is for .* compares them by dot"):
        spec_of(f"st:{folder}", precision="int8")


@pytest.mark.parametrize("folder", ["nvembed", "biencoder", "mteb"])
def test_mtebs_own_check_of_models(folder, request, registered):
    reference = "made-up/peer" if folder == "mteb" else request.getfixturevalue(folder)
    model = PlainSpecModel(spec_of(reference))
    assert len(check_with_mock_tasks(model)) >= 15
    roles = {encode_spec.role for _, side, encode_spec in model.seen if side == DOCUMENT}
    assert roles == {"document"}
    if folder == "nvembed":
        told = {encode_spec.instruction for _, side, encode_spec in model.seen if side != DOCUMENT}
        assert told
        assert "" not in told
        assert {
            encode_spec.instruction for _, side, encode_spec in model.seen if side == DOCUMENT
        } == {""}


def test_names_and_revisions_tell_models_apart(nvembed, biencoder, tmp_path):
    import shutil

    base = spec_of(nvembed)
    assert base.meta.name == "rayembed/run"  # a folder called model tells nothing
    assert base.meta.revision.startswith(f"{base.weights}-")
    assert base.meta.n_parameters == sum(p.numel() for p in load_model(nvembed).parameters())
    copied = shutil.copytree(nvembed, tmp_path / "run" / "model")
    assert spec_of(copied).meta == base.meta
    others = [
        spec_of(nvembed, dtype="bfloat16"),
        spec_of(nvembed, max_length=50),
        spec_of(nvembed, dimensions=16),
        spec_of(nvembed, prompts={"instructions": {"SciFact": "x"}}),
        spec_of(nvembed, prompts={"table": "none"}),
    ]
    revisions = [spec.meta.revision for spec in (base, *others)]
    assert len(set(revisions)) == len(revisions)
    # Vectors of the same text and encode spec are shared where nothing but prompts differs.
    assert others[3].fingerprint == base.fingerprint
    assert len({spec.fingerprint for spec in (base, *others[:3])}) == 4
    assert spec_of(nvembed, tokens_per_batch=64).meta.revision == base.meta.revision
    save_decoder(copied, "mistral", sliding_window=None, seed=1)  # other weights
    assert spec_of(copied).weights != base.weights


def test_a_folder_that_changes_after_the_spec_was_made_is_refused(biencoder, tmp_path):
    import shutil

    for prefix in ("", "st:"):
        folder = shutil.copytree(biencoder, tmp_path / f"model{prefix[:2]}")
        spec = spec_of(f"{prefix}{folder}")
        settings = folder / "tokenizer_config.json"
        settings.write_text(settings.read_text() + " ")
        with pytest.raises(ArtifactError, match="give all machines the same"):
            spec.load("cpu")


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("hf://org/name@main", "org/name"),
        ("models:/quick@champion", "rayembed/quick"),
        ("models:/quick/3", "rayembed/quick"),
        ("pypi://gt-minilm==0.1/x?sha256=00", "rayembed/gt-minilm"),
        ("/a/b/my run/model", "rayembed/my-run"),
        ("s3://bucket/runs/one/export/", "rayembed/one"),
        ("/a/encoder", "rayembed/encoder"),
    ],
)
def test_names_come_from_references(reference, name):
    assert name_of(reference) == name


def test_lengths_are_the_smaller_of_settings_and_model(nvembed, biencoder):
    assert dict(spec_of(nvembed).max_lengths) == {"query": 64, "document": 100}
    assert dict(spec_of(nvembed, max_length=70).max_lengths) == {"query": 64, "document": 70}
    spec = spec_of(biencoder, max_length=8)
    model = load_model(biencoder)
    model.tokenizer.max_lengths = {"query": 8, "document": 8}
    encode_spec = spec.encode_spec(SCIFACT, DOCUMENT)
    expected = encode(model, TEXTS, role="document", allow_empty=True)
    np.testing.assert_allclose(spec.load("cpu")(TEXTS, encode_spec), expected, atol=EXACT)


def test_queries_with_examples_are_read_as_long_as_they_were_trained(tmp_path):
    parts = {
        "backbone": save_decoder(tmp_path / "llm", "llama"),
        "encoder": save_encoder(tmp_path / "encoder"),
    }
    values = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given", "max_length": 32},
        "query_max_length": 700,
        "document_max_length": 700,
    }
    for examples, expected in ((None, 512), ({"max_tokens": 600}, 700)):
        config = parse(Causal2VecConfig, {**values, "examples": examples})
        folder = tmp_path / str(expected)
        build_model(config, parts, seed=0).save(folder)
        lengths = {"query": expected, "document": 512}
        assert dict(spec_of(folder).max_lengths) == lengths
        assert dict(spec_of(folder, max_length=300).max_lengths) == dict.fromkeys(lengths, 300)


def test_vectors_are_cut_and_brought_to_unit_length(biencoder, caplog):
    spec = spec_of(biencoder, dimensions=12)
    assert "was not trained to be cut to 12 of its 32 dimensions" in caplog.text
    assert spec.meta.embed_dim == 12
    encode_spec = spec.encode_spec(SCIFACT, QUERY)
    found = spec.load("cpu")(TEXTS, encode_spec)
    whole = spec_of(biencoder).load("cpu")(TEXTS, encode_spec)[:, :12]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=EXACT)
    caplog.clear()
    settings = json.loads((biencoder / "rayembed.json").read_text())
    assert settings["dimensions"] == [32]
    assert spec_of(biencoder, dimensions=32).dimensions == 32
    assert not caplog.text
    with pytest.raises(ConfigError, match="dimensions = 64 exceeds the 32"):
        spec_of(biencoder, dimensions=64)


def test_bfloat16_stays_near(biencoder):
    spec, rounded = spec_of(biencoder), spec_of(biencoder, dtype="bfloat16")
    encode_spec = spec.encode_spec(SCIFACT, QUERY)
    one, two = (s.load("cpu")(TEXTS, encode_spec) for s in (spec, rounded))
    assert two.dtype == np.float32
    cosines = (one * two).sum(axis=1)
    assert 0.99 < cosines.min() < 1 - 1e-7


def test_the_table_of_prompts(nvembed):
    spec = spec_of(nvembed)
    tasks = mteb.get_tasks(tasks=["SciFact", "STS12", "CQADupstackRetrieval"])
    rows = prompts_table(spec, tasks)
    assert len(rows) == 2 + 1 + 2 * 12
    told = {(row.task, row.side): row for row in rows}
    assert told["SciFact", "query"].prompt.endswith("support or refute the claim\nQuery: ")
    assert told["SciFact", "document"].prompt == ""
    assert told["SciFact", "document"].role == "document"
    assert (told["STS12", "text"].role, told["STS12", "text"].type) == ("query", "STS")
    assert "Stackexchange" in told["CQADupstackTexRetrieval", "query"].prompt
    record = json.loads(json.dumps(prompts_record(spec, tasks)))
    assert record["revision"] == spec.meta.revision
    assert record["conditions"]["software"] == "vectors 1, scores 1"
    facts = {"task", "type", "metric", "dataset"}
    assert record["prompts"][0].keys() == {*facts, "side", "role", "prompt"}
    assert (rows[0].metric, rows[0].dataset) == ("ndcg_at_10", "mteb/scifact")
    text = format_prompts(rows)
    assert "document  no prompt" in text
    assert text.count("Stackexchange") == 1


def test_metadata_of_tasks_travels_as_text():
    assert task_text(SCIFACT) == "SciFact"
    assert task_metadata("SciFact") == SCIFACT
    own = SCIFACT.model_copy(update={"name": "OwnLawTask", "prompt": None, "type": "STS"})

    class OwnLawTask(mteb.AbsTask):
        metadata = own
        abstask_prompt = "find the law"

    text = task_text(own)
    assert task_metadata(text) == own
    # mteb's name over other data is another task.
    other = SCIFACT.model_copy(update={"prompt": {"query": "other"}})
    assert task_metadata(task_text(other)) == other


def test_the_class_prompt_of_a_task_travels_to_processes_that_lack_the_class(tmp_path):
    import sys

    import prepared

    own = SCIFACT.model_copy(update={"name": "OwnFarTask", "prompt": None})

    class OwnFarTask(mteb.AbsTask):
        metadata = own
        abstask_prompt = "find what is far"

    (tmp_path / "task.txt").write_text(task_text(own))
    code = (
        "import sys; from pathlib import Path\n"
        "from rayembed.evaluation.task_text import task_metadata\n"
        "from mteb.abstasks.abstask import get_abstask_prompt\n"
        "found = task_metadata(Path(sys.argv[1]).read_text())\n"
        "print(found.name, '|', get_abstask_prompt(found.name))"
    )
    done = prepared.run([sys.executable, "-c", code, str(tmp_path / "task.txt")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "OwnFarTask | find what is far"


def test_an_incomplete_folder_is_refused_before_anything_is_loaded(nvembed, tmp_path):
    import shutil

    folder = shutil.copytree(nvembed, tmp_path / "model")
    weights = folder / "backbone" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    for prefix in ("", "st:"):
        with pytest.raises(ArtifactError, match=r"cut off: it has \d+ bytes and its header"):
            spec_of(f"{prefix}{folder}")
    weights.write_bytes(whole[:5])
    with pytest.raises(ArtifactError, match="cut off or no safetensors"):
        check_weight_files(folder)
    settings = json.loads((folder / "rayembed.json").read_text())
    settings["model"]["pooling"] = {"kind": "latent_attention"}
    weights.write_bytes(whole)
    (folder / "rayembed.json").write_text(json.dumps(settings))
    with pytest.raises(ArtifactError, match=r"pooling\.safetensors is missing"):
        spec_of(folder)
    shutil.copy(nvembed / "rayembed.json", folder)
    weights.unlink()
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "backbone" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "backbone" / "model-1-of-2.safetensors").write_bytes(whole)
    with pytest.raises(ArtifactError, match=r"1 are missing: model-2-of-2\.safetensors"):
        spec_of(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(AssetError, match=r"neither config\.json nor modules\.json"):
        spec_of(folder)


def test_what_gives_no_single_dense_vector_is_refused(tmp_path, sentence_folder, monkeypatch):
    import shutil

    save_cross_encoder(tmp_path / "cross")
    with pytest.raises(ArtifactError, match="cross-encoder, which scores pairs"):
        spec_of(f"st:{tmp_path / 'cross'}")
    for kind, message in (("SparseEncoder", "sparse"), ("ColBERT", "multi-vector")):
        folder = shutil.copytree(sentence_folder, tmp_path / kind)
        path = folder / "config_sentence_transformers.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
        with pytest.raises(ArtifactError, match=message):
            spec_of(f"st:{folder}")
    for name, message in (
        ("cross-encoder/ms-marco-MiniLM-L6-v2", "kind cross-encoder"),
        ("lightonai/GTE-ModernColBERT-v1", "kind late-interaction"),
        ("naver/splade-v3", "kind sparse"),
        ("jxm/cde-small-v2", "samples its context"),
        ("facebook/dinov2-base", "no text"),
    ):
        assert name in MODEL_REGISTRY
        with pytest.raises(ConfigError, match=message):
            spec_of(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": {"query_prefix": "x"}}, "prompts is set for the model 'made-up/peer'"),
        ({"tokens_per_batch": 8}, "tokens_per_batch is set"),
        ({"dimensions": 7}, r"mteb states \[32, 16\]"),
        ({"revision": "other"}, "revision = 'other'"),
    ],
)
def test_settings_that_a_model_of_mteb_does_not_take(registered, settings, message):
    with pytest.raises(ConfigError, match=message):
        spec_of("made-up/peer", **settings)


def test_a_name_that_mteb_does_not_know_is_a_model_of_the_hub(
    registered, sentence_folder, monkeypatch
):
    asked = []

    def resolve(reference):
        asked.append(reference)
        return sentence_folder

    monkeypatch.setattr("rayembed.evaluation.sentence_spec.resolve_model", resolve)
    spec = spec_of("someone/encoder", revision="v2")
    assert asked == ["hf://someone/encoder@v2"]
    assert spec.meta.name == "someone/encoder"
    assert spec.load("cpu")(TEXTS, spec.encode_spec(STS, None)).shape == (5, 32)

    def fail(reference):
        raise AssetError("not there")

    monkeypatch.setattr("rayembed.evaluation.sentence_spec.resolve_model", fail)
    with pytest.raises(AssetError, match=r"did you mean 'made-up/peer'.*hub: not there"):
        spec_of("made-up/peers")
    with pytest.raises(AssetError, match=r"mteb has no model 'made-up/peers'; did you mean"):
        spec_of("mteb:made-up/peers")


def test_settings_that_others_do_not_take(biencoder):
    with pytest.raises(ConfigError, match="prompts is set"):
        spec_of(f"st:{biencoder}", prompts={"table": "none"})
    for prefix in ("", "st:"):
        with pytest.raises(ConfigError, match="revision = 'x' is for models that mteb loads"):
            spec_of(f"{prefix}{biencoder}", revision="x")
    with pytest.raises(ConfigError, match="bm25 has no vectors"):
        spec_of("bm25")
    with pytest.raises(ConfigError, match="did you mean 'SciFact'"):
        spec_of(biencoder, prompts={"instructions": {"SciFacts": "x"}})


def test_what_loads_a_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert loader_of("bm25") == "bm25"
    assert loader_of("st:hf://a/b@main") == "sentence-transformers"
    assert loader_of("mteb:a/b") == loader_of("intfloat/e5-base-v2") == "mteb"
    assert loader_of("runs/one") == "rayembed"
    for reference in ("/a/b", "./a/b", "../a/b", "hf://a/b", "models:/a@b", "s3://a/b", "one"):
        assert loader_of(reference) == "rayembed"


def test_a_published_mixture_is_evaluated_in_full_and_refused_to_others(tmp_path):
    folder = save_nomic(tmp_path / "nomic-embed-text-v2-moe")
    spec = make_spec(parse(ModelUnderTest, {"reference": str(folder)}))
    assert spec.dimensions == 32
    assert spec.prompts.table == "nomic"
    with pytest.raises(ArtifactError, match="silently compute as another model"):
        make_spec(parse(ModelUnderTest, {"reference": f"st:{folder}"}))

"""Specs of models under evaluation: what they embed, how they are named, what they refuse."""

import json
import pickle
import shutil
import sys
from types import SimpleNamespace

import mteb
import numpy as np
import pytest
import torch
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.models import SentenceTransformerEncoderWrapper
from mteb.models.abs_encoder import get_prompt
from plain_spec_model import PlainSpecModel, check_with_mock_tasks
from sentence_folder import (
    DOCUMENT,
    EXACT,
    QUERY,
    QUIET,
    SCIFACT,
    STS,
    TEXTS,
    check_scores_as_with_mteb,
    check_vectors_as_with_mteb,
    save_sentence_folder,
    scores_by_place,
    seeded_mock_run,
    spec_of,
)
from sentence_transformers import SentenceTransformer
from tiny_models import save_decoder, save_encoder, save_nomic

from rayembed.config.backbone import BackboneConfig, MeanPooling
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.evaluation.model_spec import LOADERS, EncodeSpec, ModelLoader
from rayembed.evaluation.prompts_table import format_prompts, prompts_record, prompts_table
from rayembed.evaluation.rayembed_spec import name_of
from rayembed.evaluation.run_scores import make_spec
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import check_weight_files
from rayembed.models.loading.load import load_model
from rayembed.models.loading.saved_prompts import SYMMETRIC_TYPES
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode

pytestmark = QUIET


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


def test_a_folder_of_sentence_transformers_scores_as_with_mteb(tmp_path):
    folder = save_sentence_folder(tmp_path)
    check_scores_as_with_mteb(folder, folder)


def test_vectors_of_a_folder_of_sentence_transformers(tmp_path):
    folder = save_sentence_folder(tmp_path)
    check_vectors_as_with_mteb(pickle.loads(pickle.dumps(spec_of(folder))), folder)


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
        assert scores_by_place(ours[name]) == pytest.approx(
            scores_by_place(theirs[name]), abs=1e-6
        ), name


@pytest.mark.parametrize("folder", ["nvembed", "biencoder"])
def test_mtebs_own_check_of_models(folder, request):
    model = PlainSpecModel(spec_of(request.getfixturevalue(folder)))
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

    folder = shutil.copytree(biencoder, tmp_path / "model")
    spec = spec_of(folder)
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
    assert "was not trained to have its vectors cut to 12 of 32 dimensions" in caplog.text
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
    with pytest.raises(ConfigError, match="dimensions = 64 exceeds the vector width 32"):
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


def test_an_incomplete_folder_is_refused_before_anything_is_loaded(nvembed, tmp_path):

    folder = shutil.copytree(nvembed, tmp_path / "model")
    weights = folder / "backbone" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ArtifactError, match=r"cut off: it has \d+ bytes, but its header"):
        spec_of(folder)
    weights.write_bytes(whole[:5])
    with pytest.raises(ArtifactError, match="cut off or is not a safetensors"):
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


def test_settings_that_others_do_not_take(biencoder):
    with pytest.raises(ConfigError, match="revision = 'x' applies only to models that mteb loads"):
        spec_of(biencoder, revision="x")
    with pytest.raises(ConfigError, match="bm25 has no vectors"):
        spec_of("bm25")
    with pytest.raises(ConfigError, match="did you mean 'SciFact'"):
        spec_of(biencoder, prompts={"instructions": {"SciFacts": "x"}})


def test_a_loader_of_another_package_makes_the_specs_of_its_references(monkeypatch, biencoder):
    made = ModelLoader(lambda reference: reference.startswith("made-up:"), "made_up_loader:spec")
    module = SimpleNamespace(spec=lambda *given, on: (given, on))
    monkeypatch.setitem(sys.modules, "made_up_loader", module)
    monkeypatch.setitem(LOADERS.built_in, "made-up", made)
    (settings,), on = make_spec(ModelUnderTest(reference="made-up:one"), on="cpu")
    assert (settings.reference, on) == ("made-up:one", "cpu")
    assert spec_of(biencoder).reference == str(biencoder), "what no loader takes"


def test_a_published_mixture_is_evaluated_in_full(tmp_path):
    folder = save_nomic(tmp_path / "nomic-embed-text-v2-moe")
    spec = make_spec(parse(ModelUnderTest, {"reference": str(folder)}))
    assert spec.dimensions == 32
    assert spec.prompts.table == "nomic"

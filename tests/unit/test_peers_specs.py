"""Specs of models that mteb or sentence-transformers loads: what they embed and refuse."""

import json
import pickle
import shutil
import sys

import mteb
import numpy as np
import pytest
import torch
import transformers
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.models.model_implementations import MODEL_REGISTRY
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
    spec_of,
)
from sentence_transformers import SentenceTransformer
from small_device import SAYS
from tiny_folders import save_biencoder
from tiny_models import save_cross_encoder, save_encoder, save_nomic

from rayembed.errors import ArtifactError, AssetError, ConfigError, DeviceMemoryError
from rayembed.evaluation.model_spec import LOADERS, EncodeSpec
from rayembed.models import versions
from rayembed_extras.peers.mteb_spec import metadata_of, task_text
from rayembed_extras.peers.sentence_spec import _in_bfloat16

pytestmark = QUIET


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory):
    return save_sentence_folder(tmp_path_factory.mktemp("sentence"))


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


def test_a_folder_scores_as_with_mteb(sentence_folder):
    check_scores_as_with_mteb(f"st:{sentence_folder}", sentence_folder)


def test_vectors_of_a_folder(sentence_folder):
    spec = pickle.loads(pickle.dumps(spec_of(f"st:{sentence_folder}")))
    check_vectors_as_with_mteb(spec, sentence_folder)


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
    with pytest.raises(ConfigError, match=r"precision = 'int8' needs .* compares them by dot"):
        spec_of(f"st:{folder}", precision="int8")


def test_mtebs_own_check_of_models(registered):
    model = PlainSpecModel(spec_of("made-up/peer"))
    assert len(check_with_mock_tasks(model)) >= 15
    roles = {encode_spec.role for _, side, encode_spec in model.seen if side == DOCUMENT}
    assert roles == {"document"}


def test_a_folder_that_changes_or_is_cut_off_is_refused(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    spec = spec_of(f"st:{folder}")
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(ArtifactError, match="give all machines the same"):
        spec.load("cpu")
    (weights,) = folder.rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"cut off: it has \d+ bytes, but its header"):
        spec_of(f"st:{folder}")


def test_metadata_of_tasks_travels_as_text():
    assert task_text(SCIFACT) == "SciFact"
    assert metadata_of("SciFact") == SCIFACT
    own = SCIFACT.model_copy(update={"name": "OwnLawTask", "prompt": None, "type": "STS"})

    class OwnLawTask(mteb.AbsTask):
        metadata = own
        abstask_prompt = "find the law"

    text = task_text(own)
    assert metadata_of(text) == own
    # mteb's name over other data is another task.
    other = SCIFACT.model_copy(update={"prompt": {"query": "other"}})
    assert metadata_of(task_text(other)) == other


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
        "from rayembed_extras.peers.mteb_spec import metadata_of\n"
        "from mteb.abstasks.abstask import get_abstask_prompt\n"
        "found = metadata_of(Path(sys.argv[1]).read_text())\n"
        "print(found.name, '|', get_abstask_prompt(found.name))"
    )
    done = prepared.run([sys.executable, "-c", code, str(tmp_path / "task.txt")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "OwnFarTask | find what is far"


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
        ({"dimensions": 7}, r"according to mteb, .* gives vectors of \[32, 16\]"),
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

    monkeypatch.setattr("rayembed_extras.peers.sentence_spec.resolve_model", resolve)
    spec = spec_of("someone/encoder", revision="v2")
    assert asked == ["hf://someone/encoder@v2"]
    assert spec.meta.name == "someone/encoder"
    assert spec.load("cpu")(TEXTS, spec.encode_spec(STS, None)).shape == (5, 32)

    def fail(reference):
        raise AssetError("not there")

    monkeypatch.setattr("rayembed_extras.peers.sentence_spec.resolve_model", fail)
    with pytest.raises(AssetError, match=r"did you mean 'made-up/peer'.*hub says: not there"):
        spec_of("made-up/peers")
    with pytest.raises(AssetError, match=r"mteb has no model 'made-up/peers'; did you mean"):
        spec_of("mteb:made-up/peers")


def test_settings_that_sentence_transformers_does_not_take(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    with pytest.raises(ConfigError, match="prompts is set"):
        spec_of(f"st:{folder}", prompts={"table": "none"})
    with pytest.raises(ConfigError, match="revision = 'x' has an effect only for models"):
        spec_of(f"st:{folder}", revision="x")


def test_what_loads_a_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)

    def loaders_of(reference):
        return [name for name, loader in LOADERS.members().items() if loader.takes(reference)]

    assert loaders_of("st:hf://a/b@main") == ["sentence-transformers"]
    assert loaders_of("mteb:a/b") == loaders_of("intfloat/e5-base-v2") == ["mteb"]
    own = ("/a/b", "./a/b", "../a/b", "hf://a/b", "models:/a@b", "s3://a/b", "one")
    for reference in ("bm25", "runs/one", *own):
        assert loaders_of(reference) == []


def test_a_published_mixture_is_refused(tmp_path):
    folder = save_nomic(tmp_path / "nomic-embed-text-v2-moe")
    with pytest.raises(ArtifactError, match="silently compute as another model"):
        spec_of(f"st:{folder}")


def specs_of(folder):
    """A spec by each loader."""
    return [spec_of(f"st:{folder}"), spec_of("mteb:intfloat/e5-base-v2")]


@pytest.mark.parametrize("number", ["VECTORS", "SCORES"])
def test_every_kind_of_spec_is_named_by_the_numbers(number, tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    names = [(spec.fingerprint, spec.meta.revision) for spec in specs_of(folder)]
    for module in ("sentence_spec", "mteb_spec"):
        monkeypatch.setattr(f"rayembed_extras.peers.{module}.{number}", "raised")
    for spec, (vectors, revision) in zip(specs_of(folder), names, strict=True):
        assert (spec.fingerprint != vectors) == (number == "VECTORS")
        assert spec.meta.revision != revision
        assert spec.meta.revision.rpartition("-")[0] == revision.rpartition("-")[0]


def test_versions_of_libraries_and_source_name_nothing(tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    read, watching = [], []
    sys.addaudithook(  # for good: it is taken off by none
        lambda event, given: read.append(str(given[0])) if event == "open" and watching else None
    )
    names = [(spec.fingerprint, spec.meta.revision) for spec in specs_of(folder)]
    monkeypatch.setattr(versions, "version", lambda name: "99.0")
    watching.append(True)
    assert [(spec.fingerprint, spec.meta.revision) for spec in specs_of(folder)] == names
    watching.clear()
    assert any(path.endswith("config.json") for path in read), "control: reading is seen"
    assert not [path for path in read if path.endswith((".py", ".pyc"))]


def test_a_model_that_does_not_fit_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError(SAYS)

    spec = spec_of(f"st:{save_encoder(tmp_path / 'encoder')}")
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(DeviceMemoryError, match=r"^the model '.*' does not fit into memory: "):
        spec.load("cpu")


def test_sentence_transformers_goes_on_with_fewer_texts(tmp_path, monkeypatch):
    embed = spec_of(f"st:{save_encoder(tmp_path)}").load("cpu")
    texts = [f"{'a text of ' * (i % 7)}number {i}" for i in range(40)]
    expected = embed(texts, EncodeSpec("query"))
    forward, tried = transformers.BertModel.forward, []

    def fits(*given, **named):
        ids = named["input_ids"] if "input_ids" in named else given[0]["input_ids"]
        tried.append(ids.numel())
        if ids.numel() > 200:
            raise torch.OutOfMemoryError(SAYS)
        return forward(*given, **named)

    monkeypatch.setattr(transformers.BertModel, "forward", fits)
    np.testing.assert_allclose(embed(texts, EncodeSpec("query")), expected, atol=1e-6)
    assert any(size > 200 for size in tried)
    tried.clear()
    embed(texts, EncodeSpec("query"))
    assert max(tried) <= 200


@pytest.mark.parametrize("path", ["../other", "/etc", "1_Pooling/../../x"])
def test_modules_lie_in_their_folder(path, tmp_path):
    kinds = {"Transformer": "", "Pooling": path}
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": place, "idx": n, "name": str(n)}
        for n, (kind, place) in enumerate(kinds.items())
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ArtifactError, match="no path inside its folder"):
        _in_bfloat16(tmp_path)

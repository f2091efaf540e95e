"""Graphs for CPU runtimes: the vectors of every architecture, wherever the folder is read."""

import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from fastapi.testclient import TestClient
from sentence_transformers import SentenceTransformer
from tiny_folders import TINY, save_tiny
from tiny_models import LINES, save_encoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.evaluation.rayembed_spec import rayembed_spec
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, load_model, saved_widths
from rayembed.models.loading.saved_folder import read_settings
from rayembed.models.passes.encoding import corpus_context, encode
from rayembed.models.saving.export import read_compression
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed.registry.pyfunc_model import OpenAIEmbeddings
from rayembed_extras.compression import trace
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.runtime_model import RuntimeModel
from rayembed_extras.compression.runtimes import Onnx, OpenVINO
from rayembed_extras.serving import on_ray as serving_on_ray
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.settings import Limits, ServedModel

TEXTS = [
    *LINES[1:],
    "Paris",
    "where do cats and dogs live, and how large are they in the ancient world of Paris",
]
"""Of other numbers and lengths than those that are traced."""
CALIBRATION = [CalibrationText(text, role) for text in TEXTS for role in ("query", "document")]
RUNTIMES = {"onnx": Onnx, "openvino": OpenVINO}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Folders of tiny models and of their graphs, each made once; what is traced is kept."""
    folder = tmp_path_factory.mktemp("graphs")
    written = trace.write_onnx

    def once(model, path, *, context=False):
        kept = folder / f"{model.config.kind}-{context}.onnx"
        if not kept.exists():
            written(model, kept, context=context)
        shutil.copy(kept, path)

    def source(kind):
        place = folder / kind
        return place if place.exists() else save_tiny(kind, place)

    def graph(kind, runtime, **settings):
        way = RUNTIMES[runtime](**{"precision": "float32"} | settings)
        place = folder / f"{kind}-{way.label}"
        if not place.exists():
            way.compress(CompressionSource(source(kind), CALIBRATION), place)
        return place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "write_onnx", once)
        yield SimpleNamespace(source=source, graph=graph, folder=folder)


def ready(folder, **options):
    model = load_model(folder, **options)
    if model.uses_context:
        model.set_corpus(corpus_context(model, LINES))
    return model


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", TINY)
def test_a_graph_gives_the_vectors_of_its_model(given, kind, runtime):
    folder = given.graph(kind, runtime)
    model, graph = ready(given.source(kind), dtype="float32"), ready(folder)
    assert isinstance(graph, RuntimeModel)
    assert graph.dimensions == model.dimensions == saved_widths(folder)
    assert type(check_loadable(folder)) is type(model.config)
    for role in ("query", "document"):
        for tokens_per_batch in (None, 1, 60):
            seen, expected = (
                encode(one, TEXTS, role=role, tokens_per_batch=tokens_per_batch)
                for one in (graph, model)
            )
            np.testing.assert_allclose(seen, expected, atol=1e-5)
    # So small a difference is not what any two models of the kind have.
    other = ready(save_tiny(kind, given.folder / f"{kind}-{runtime}-other", seed=7))
    assert np.abs(encode(other, TEXTS, role="query") - encode(model, TEXTS, role="query")).max() > (
        1e-2
    )
    again = pickle.loads(pickle.dumps(graph))
    np.testing.assert_array_equal(
        encode(again, TEXTS, role="query"), encode(graph, TEXTS, role="query")
    )


READ_ELSEWHERE = [
    ("biencoder", "onnx", "float32"),
    ("nomic-moe", "openvino", "float32"),
    ("biencoder", "onnx", "int8-static"),
    ("biencoder", "openvino", "int8-static"),
    ("biencoder", "onnx", "int8-dynamic"),
    ("biencoder", "openvino", "int8-dynamic"),
]
"""Kind, runtime and precision of graphs that others read than our own loader."""


def wanted_model(given, kind, folder, precision):
    """Whose vectors a graph must give: the model's, of int8 those that our own loader reads."""
    return load_model(given.source(kind) if precision == "float32" else folder, dtype="float32")


@pytest.mark.parametrize(("kind", "runtime", "precision"), READ_ELSEWHERE)
def test_sentence_transformers_and_mlflow_read_the_folder(
    given, kind, runtime, precision, tmp_path
):
    folder = given.graph(kind, runtime, precision=precision)
    model = wanted_model(given, kind, folder, precision)
    query, document = (encode(model, TEXTS, role=role) for role in ("query", "document"))
    theirs = SentenceTransformer(str(folder), device="cpu")
    theirs.save(str(tmp_path / "saved"))
    for loaded in (
        theirs,
        as_sentence_transformer(folder),
        SentenceTransformer(f"{tmp_path}/saved"),
    ):
        np.testing.assert_allclose(loaded.encode_query(TEXTS), query, atol=1e-5)
        np.testing.assert_allclose(loaded.encode_document(TEXTS), document, atol=1e-5)
    served = OpenAIEmbeddings()
    stated = {"instruction_template": model.config.template, "dimensions": list(model.dimensions)}
    served.load_context(SimpleNamespace(artifacts={"model": folder}, model_config=stated))
    answer = served.predict(None, {"input": TEXTS, "role": "document"})
    np.testing.assert_allclose([one["embedding"] for one in answer["data"]], document, atol=1e-5)
    load_model(folder).save(tmp_path / "copied")
    assert weights_fingerprint(tmp_path / "copied") == weights_fingerprint(folder)


def test_a_corpus_is_set_and_saved_as_with_the_model(given, tmp_path):
    graph, model = (
        load_model(given.graph("cde", "onnx")),
        load_model(given.source("cde"), dtype="float32"),
    )
    alone = encode(graph, TEXTS, role="query")
    for documents in (LINES[1:3], LINES[1:]):
        for one in (graph, model):
            one.set_corpus(corpus_context(one, documents))
        seen = encode(graph, TEXTS, role="query")
        np.testing.assert_allclose(seen, encode(model, TEXTS, role="query"), atol=1e-5)
        assert np.abs(seen - alone).max() > 1e-3
    graph.save(tmp_path / "of a corpus")
    found = encode(load_model(tmp_path / "of a corpus"), TEXTS, role="query")
    np.testing.assert_array_equal(found, seen)
    graph.set_corpus(graph.no_context())
    np.testing.assert_array_equal(encode(graph, TEXTS, role="query"), alone)
    with pytest.raises(DataError, match="at most 4"):
        graph.set_corpus(torch.zeros(5, 32))
    plain = load_model(given.graph("biencoder", "onnx"))
    with pytest.raises(TypeError, match="does not use context documents"):
        plain.set_corpus(None)


@pytest.mark.parametrize("precision", ["int8-dynamic", "int8-static"])
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", ["biencoder", "nomic-moe"])
def test_int8_counts_its_weights_and_says_how_close_it_is(given, kind, runtime, precision):
    folder = given.graph(kind, runtime, precision=precision)
    told = read_compression(folder)
    matrices = sum(some for _, some in told["by_part"].values())
    assert told["compressed"] == matrices > 0
    assert told["by_part"]["embeddings"][1] == 0
    model, graph = load_model(given.source(kind), dtype="float32"), load_model(folder)
    seen, expected = (encode(one, TEXTS, role="query") for one in (graph, model))
    cosines = (seen * expected).sum(axis=1)
    assert 0.9 < told["cosine_lowest"] <= told["cosine_mean"] < 1 - 1e-6
    assert cosines.min() > 0.9
    assert np.abs(seen - expected).max() > 1e-4
    np.testing.assert_allclose(np.linalg.norm(seen, axis=1), 1, atol=1e-5)


def test_what_is_left_alone_stays_float(given):
    whole = read_compression(given.graph("biencoder", "onnx", precision="int8-dynamic"))
    place = given.folder / "some"
    way = Onnx(precision="int8-dynamic", skip=("*.attention.*", "*.pooler.*"))
    told = way.compress(CompressionSource(given.source("biencoder"), CALIBRATION), place)
    assert told.by_part["attention"][1] == 0
    assert 0 < told.compressed < whole["compressed"]


def test_the_graph_tells_nothing_of_the_machine(given):
    text = (given.graph("biencoder", "onnx") / "graph.onnx").read_bytes()
    model = onnx.load_from_string(text)
    assert not model.metadata_props
    assert not any(node.metadata_props for node in model.graph.node)
    assert b"site-packages" not in text


def test_evaluation_takes_the_graph_as_it_is(given):
    folder = given.graph("nomic-moe", "onnx")
    settings = ModelUnderTest(reference=str(folder), dtype="bfloat16", dimensions=16)
    spec = rayembed_spec(settings)
    assert spec.settings.dtype == "saved"
    model = load_model(given.source("nomic-moe"), dtype="float32")
    assert spec.num_parameters == sum(one.numel() for one in model.parameters())
    assert spec.load("cpu")(
        TEXTS, SimpleNamespace(context="", role="query", instruction="")
    ).shape == (len(TEXTS), 16)


@pytest.mark.parametrize(("kind", "runtime", "precision"), READ_ELSEWHERE)
def test_a_server_answers_with_the_vectors_of_the_model(given, kind, runtime, precision):
    folder = given.graph(kind, runtime, precision=precision)
    served = ServedModel(name="tiny", model=str(folder), dtype="bfloat16")
    threads = torch.get_num_threads()
    try:
        service = serving_on_ray.load(served, Limits(), None)
    finally:
        torch.set_num_threads(threads)
    client = TestClient(make_app({"tiny": service}, Limits()))
    answer = client.post("/v1/embeddings", json={"input": TEXTS, "role": "query"}).json()
    model = wanted_model(given, kind, folder, precision)
    found = [one["embedding"] for one in answer["data"]]
    np.testing.assert_allclose(found, encode(model, TEXTS, role="query"), atol=1e-5)


def test_nothing_is_trained_from_a_graph(given):
    folder = given.graph("biencoder", "onnx")
    config = read_settings(folder)
    for call in (
        lambda: check_buildable(config, folder),
        lambda: build_model(config, folder, seed=1),
        lambda: Onnx().check(folder),
        lambda: Onnx().compress(CompressionSource(folder, CALIBRATION), given.folder / "never"),
        lambda: load_model(folder).load_state_dict({}),
    ):
        with pytest.raises(ConfigError, match="use the model that it was exported from"):
            call()
    assert not (given.folder / "never").exists()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_damaged_graph_is_told_and_not_computed(given, runtime, tmp_path):
    folder = shutil.copytree(given.graph("biencoder", runtime), tmp_path / "damaged")
    (file,) = folder.glob("graph.onnx" if runtime == "onnx" else "graph.xml")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ArtifactError, match="cannot be opened"):
        encode(load_model(folder), TEXTS, role="query")
    file.unlink()
    with pytest.raises(ArtifactError, match=r"graph files graph\.\w+ are missing"):
        load_model(folder)
    with pytest.raises(ArtifactError, match="incomplete"):
        check_loadable(folder)


def test_too_few_texts_and_far_vectors_are_refused(given):
    source, output = given.source("biencoder"), given.folder / "refused"
    with pytest.raises(ConfigError, match="at least 8 calibration texts, but got 3"):
        Onnx(precision="int8-static").compress(CompressionSource(source, CALIBRATION[:3]), output)
    with pytest.raises(ArtifactError, match="the minimum mean cosine is least_cosine=1"):
        Onnx(precision="int8-dynamic", least_cosine=1.0).compress(CompressionSource(source), output)
    with pytest.raises(ConfigError, match="matches no parameter"):
        Onnx(skip=("*.no_such.*",)).compress(CompressionSource(source), output)
    assert not output.exists()
    assert not list(given.folder.glob(".refused*"))
    save_encoder(given.folder / "plain")
    with pytest.raises(ConfigError, match="matches no parameter"):
        Onnx(skip=("*.no_such.*",)).check(given.folder / "plain")
    Onnx().check(given.folder / "plain")


def test_a_missing_package_is_told_with_its_command(given, monkeypatch):
    monkeypatch.setattr("rayembed.errors.find_spec", lambda _: None)
    for name in ("onnxruntime", "nncf"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    for way, name in ((Onnx(), "onnxruntime"), (OpenVINO(), "nncf")):
        with pytest.raises(ConfigError, match=rf"{name}.*pip install '\.\[compress\]'"):
            way.check(given.source("biencoder"))


def test_passes_that_no_graph_can_have_are_refused_before_work(given, monkeypatch):
    from rayembed.models.transformer_model import PooledTransformer

    forward = PooledTransformer.forward

    def by_content(model, batch, context=None):
        if int(batch["input_ids"].sum()) > 0:
            return forward(model, batch, context)
        raise AssertionError

    Onnx(precision="float32").check(given.source("biencoder"))
    monkeypatch.setattr(PooledTransformer, "forward", by_content)
    with pytest.raises(ConfigError, match="biencoder model cannot be exported as a graph"):
        Onnx(precision="float32").check(given.source("biencoder"))

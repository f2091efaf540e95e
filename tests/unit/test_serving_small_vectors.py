"""Served int8 and binary vectors: their layout, and that evaluation searches the same ones."""

import re
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from sentence_transformers.util.quantization import quantize_embeddings
from tiny_folders import save_biencoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.types import Rescoring
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.pooled.best_documents import BestDocuments
from rayembed.evaluation.pooled.encoding_worker import comparable
from rayembed.evaluation.run_scores import make_spec
from rayembed.machine.quantisation import from_bits, from_int8, to_bits, to_int8
from rayembed.models.loading.load import load_model
from rayembed.search.stored import best_by_bits
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.service import EmbeddingService

TEXTS = ["Paris is the capital of France", "the quick brown fox", "7 wonders"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def client(folder):
    model = load_model(folder, dtype="float32")
    model.dimensions = (32, 12)
    service = EmbeddingService("tiny", model)
    with TestClient(make_app({"tiny": service}, service.limits)) as found:
        yield found


def served(client, **asked):
    answer = client.post("/v1/embeddings", json={"input": TEXTS, **asked})
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]])


@pytest.mark.parametrize("width", [32, 12])
@pytest.mark.parametrize("role", ["query", "document"])
def test_served_vectors_are_those_that_evaluation_searches(client, folder, width, role):
    asked = {"dimensions": width, "role": role}
    settings = ModelUnderTest(reference=str(folder), dimensions=width, dtype="float32")
    spec = make_spec(settings, on="cpu")
    head = spec.prompts.folder.head("", role)
    searched = comparable(spec.load("cpu")(TEXTS, EncodeSpec(role, head)), "cosine")
    plain = served(client, **asked)
    np.testing.assert_allclose(plain, searched, atol=1e-6)
    int8 = served(client, encoding_format="int8", **asked)
    assert np.array_equal(int8, to_int8(searched))
    assert np.array_equal(served(client, encoding_format="uint8", **asked), int8 + 128)
    ubinary = served(client, encoding_format="ubinary", **asked)
    assert np.array_equal(ubinary, to_bits(searched))
    assert ubinary.shape == (3, -(-width // 8))
    assert np.array_equal(served(client, encoding_format="binary", **asked), ubinary - 128)
    # What a client makes of them is near the floats.
    assert (from_int8(int8.astype(np.int8)) * plain).sum(1) == pytest.approx(np.ones(3), abs=0.01)
    signs = from_bits(ubinary.astype(np.uint8), width)
    assert np.array_equal(signs > 0, plain > 0)
    for name, bits in (("binary", ubinary - 128), ("ubinary", ubinary)):
        assert np.array_equal(quantize_embeddings(searched, name), bits)


def test_the_pages_search_finds_what_evaluation_scores(client):
    """The function of docs/serving.md on served vectors against the search of an evaluation."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"```python\n(import numpy\n.*?)```", page, flags=re.DOTALL)
    search = {}
    exec(code, search)
    documents = [f"{text} {number}" for number in range(20) for text in TEXTS]

    def vectors(texts, **asked):
        answer = client.post("/v1/embeddings", json={"input": texts, **asked})
        return np.array([item["embedding"] for item in answer.json()["data"]])

    bits = vectors(documents, encoding_format="ubinary").astype(np.uint8)
    int8 = vectors(documents, encoding_format="int8").astype(np.int8)
    floats = vectors(documents).astype(np.float32)
    asked = vectors(TEXTS, role="query").astype(np.float32)
    found = best_by_bits(asked, floats, 5, Rescoring(candidates=12, precision="int8"))
    best = BestDocuments(len(TEXTS), 5, 12)
    best.add(found.row, found.place, found.score, found.again)
    query, place, _ = best.results()
    plain = np.argsort(-(asked @ floats.T), axis=1)[:, :5]
    apart = 0
    for number, one in enumerate(asked):
        places = search["search"](one, bits, int8, k=5, candidates=12)
        assert places.tolist() == place[query == number][:5].tolist()
        apart += places.tolist() != plain[number].tolist()
    assert apart, "the control: by floats they come in another order"


def test_embed_has_the_same_formats(client):
    wanted = served(client, encoding_format="ubinary")
    answer = client.post("/embed", json={"inputs": TEXTS, "encoding_format": "ubinary"})
    assert answer.json() == wanted.tolist()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
@pytest.mark.parametrize("asked", ["int4", "INT8", ["int8"], 8])
def test_other_formats_are_refused_with_those_there_are(client, path, asked):
    body = {"input": "x", "inputs": "x", "encoding_format": asked}
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "encoding_format"
    assert "allowed: float, base64, int8, uint8, binary, ubinary" in error["message"]

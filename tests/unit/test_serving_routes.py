"""What the server takes and gives beside OpenAI's texts: token numbers, rankings, more models."""

import asyncio
import json
import pickle

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny_folders import save_biencoder, save_nvembed

from rayembed.errors import AssetError
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.on_ray import RemoteService
from rayembed_extras.serving.routes import model_tokenizer, named_tokenizer
from rayembed_extras.serving.service import EmbeddingService, ServiceError
from rayembed_extras.serving.settings import Limits

TEXTS = ["Paris is the capital of France", "the quick brown fox", "7 wonders"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_nvembed(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return load_model(save_biencoder(tmp_path_factory.mktemp("other") / "model"))


def client_of(*services):
    return TestClient(make_app({one.name: one for one in services}, services[0].limits))


@pytest.fixture
def client(model):
    return client_of(EmbeddingService("tiny", model))


def vectors(answer):
    assert answer.status_code == 200, answer.text
    body = answer.json()
    found = body if isinstance(body, list) else [item["embedding"] for item in body["data"]]
    return np.array(found, dtype=np.float32)


def refused(answer, message, field, status=400):
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("whose", ["model", "named"])
def test_token_numbers_are_the_texts_that_they_stand_for(model, folder, whose):
    """Also where the tokenizer is another one's: then its numbers are other texts to the model."""
    tokenizer = (
        model_tokenizer(model) if whose == "model" else named_tokenizer(str(folder / "backbone"))
    )
    client = client_of(EmbeddingService("tiny", model, token_arrays=tokenizer))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    wanted = encode(model, TEXTS, role="document")
    found = vectors(client.post("/v1/embeddings", json={"input": ids}))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    found = vectors(client.post("/v1/embeddings", json={"input": ids[1]}))
    np.testing.assert_allclose(found, wanted[1:2], atol=1e-6)
    found = vectors(client.post("/embed", json={"inputs": [TEXTS[0], ids[2]]}))
    np.testing.assert_allclose(found, wanted[[0, 2]], atol=1e-6)
    # The special tokens of a tokenizer are not read as text.
    whole = tokenizer.encode(TEXTS[0]).ids
    found = vectors(client.post("/v1/embeddings", json={"input": [whole]}))
    np.testing.assert_allclose(found, wanted[:1], atol=1e-6)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    for value in (size, -1, 2**70, True, 1.5, "a", None):
        refused(
            client.post("/v1/embeddings", json={"input": [[ids[0][0], value]]}),
            f"has the ids 0 to {size - 1}",
            "input",
        )
    refused(client.post("/v1/embeddings", json={"input": [[]]}), "is an empty text", "input")


def test_token_numbers_of_nobody_knows_whom_are_refused(client):
    for value in ([[1, 2]], [1, 2], ["a", [1]]):
        refused(
            client.post("/v1/embeddings", json={"input": value}),
            "OpenAIEmbeddings: check_embedding_ctx_length=False",
            "input",
        )


def test_a_tokenizer_that_is_none_is_told(tmp_path):
    with pytest.raises(AssetError, match="has no tokenizer"):
        named_tokenizer(str(tmp_path))


def test_embed_gives_the_vectors_alone(client, model):
    found = client.post("/embed", json={"inputs": [*TEXTS, TEXTS[0]]})
    wanted = encode(model, TEXTS, role="document")[[0, 1, 2, 0]]
    np.testing.assert_allclose(vectors(found), wanted, atol=1e-6)
    found = client.post("/embed", json={"inputs": TEXTS[0], "prompt_name": "query"})
    np.testing.assert_allclose(vectors(found), encode(model, TEXTS[:1], role="query"), atol=1e-6)
    asked = {"inputs": TEXTS[0], "normalize": True, "truncation_direction": "Right"}
    assert vectors(client.post("/embed?model=tiny:query", json=asked)).shape == (1, 32)


@pytest.mark.parametrize(
    ("path", "body", "message", "field"),
    [
        ("/embed", {}, "'inputs' must be a text or a list", "inputs"),
        ("/embed", {"inputs": ["a", 1]}, "inputs[1] = 1 must be a text", "inputs"),
        ("/embed", {"inputs": "a", "normalize": False}, "vectors of length 1 only", "normalize"),
        ("/embed", {"inputs": "a", "prompt_name": "sts"}, "allowed: query", "prompt_name"),
        ("/embed", {"inputs": "a", "prompt_name": ["a"]}, "allowed: query", "prompt_name"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "right end", None),
        ("/embed", {"inputs": "a", "dimensions": 5}, "allowed for this model: [32]", "dimensions"),
        (
            "/embed",
            {"inputs": "a", "model": "tiny:query", "prompt_name": "document"},
            "differ",
            "role",
        ),
        ("/rerank", {"texts": ["a"]}, "query = None must be a text", "query"),
        ("/rerank", {"query": "\ud800", "texts": ["a"]}, "surrogate", "query"),
        ("/rerank", {"query": "a", "texts": []}, "'texts' must be", "texts"),
        ("/rerank", {"query": "a", "texts": ["b", " "]}, "texts[1] is an empty", "texts"),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": 1}, "true or", "raw_scores"),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "tiny:query"}, "leave out", "model"),
        ("/v1/rerank", {"query": "a"}, "'documents' must be", "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "[0] = None", "documents"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "1 or more", "top_n"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": True}, "1 or more", "top_n"),
    ],
)
def test_wrong_requests_are_refused(client, path, body, message, field):
    field = "truncation_direction" if field is None else field
    refused(client.post(path, content=json.dumps(body)), message, field)


def test_texts_are_ranked_by_their_similarity_to_the_query(client, model, monkeypatch):
    monkeypatch.setattr(model, "default_instructions", {"query": "Find it"})
    query = "the quick fox"
    scores = encode(model, TEXTS, role="document") @ encode(model, query, role="query")
    best = np.argsort(-scores)
    # With the query in a document's role the scores would be others.
    swapped = encode(model, [*TEXTS, query], role="document")
    assert np.abs(scores - swapped[:3] @ swapped[3]).max() > 1e-3
    asked = {"query": query, "texts": TEXTS}
    raw = client.post("/rerank", json={**asked, "raw_scores": True, "return_text": True}).json()
    assert [one["index"] for one in raw] == best.tolist()
    assert [one["text"] for one in raw] == [TEXTS[i] for i in best]
    np.testing.assert_allclose([one["score"] for one in raw], scores[best], atol=1e-5)
    plain = client.post("/rerank", json=asked).json()
    np.testing.assert_allclose([one["score"] for one in plain], (1 + scores[best]) / 2, atol=1e-5)
    assert "text" not in plain[0]
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = {"model": "tiny", "query": query, "documents": documents, "top_n": 2}
    for path in ("/v1/rerank", "/v2/rerank"):
        told = client.post(path, json={**body, "return_documents": True}).json()
        assert [one["index"] for one in told["results"]] == best[:2].tolist()
        assert told["results"][0]["document"] == {"text": TEXTS[best[0]]}
        found = [one["relevance_score"] for one in told["results"]]
        np.testing.assert_allclose(found, (1 + scores[best[:2]]) / 2, atol=1e-5)
        assert told["model"] == "tiny"
    told = client.post("/rerank", json={**asked, "instruction": "find", "raw_scores": True}).json()
    wanted = encode(model, TEXTS, role="document") @ encode(
        model, query, role="query", instruction="find"
    )
    np.testing.assert_allclose([o["score"] for o in told], np.sort(wanted)[::-1], atol=1e-5)


def test_truncation_is_told_in_a_header_or_refused(client, model):
    long = "fox " * max(model.tokenizer.max_lengths.values())
    assert (
        client.post("/embed", json={"inputs": ["a", long, long]}).headers["X-Truncated-Texts"]
        == "2"
    )
    assert client.post("/embed", json={"inputs": "a"}).headers["X-Truncated-Texts"] == "0"
    asked = {"query": "a", "texts": ["b", long], "truncate": False}
    refused(client.post("/rerank", json=asked), "texts[1] has", "texts")
    asked = {"query": long, "texts": ["b"], "truncate": False}
    refused(client.post("/rerank", json=asked), "query has", "query")


def test_requests_choose_among_several_models_by_name(model, other):
    client = client_of(EmbeddingService("tiny", model), EmbeddingService("org/other", other))
    for name, one in (("tiny", model), ("org/other", other)):
        for role in ("query", "document"):
            body = {"input": TEXTS, "model": f"{name}:{role}"}
            answer = client.post("/v1/embeddings", json=body)
            np.testing.assert_allclose(vectors(answer), encode(one, TEXTS, role=role), atol=1e-5)
            assert answer.json()["model"] == name
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny", "org/other"]
    assert client.get("/v1/models/org/other").json()["id"] == "org/other"
    assert client.get("/v1/models/third").status_code == 404
    asked = {"input": "x"}
    answer = client.post("/v1/embeddings", json=asked)
    refused(answer, "'model' must be one of 'tiny', 'org/other'", "model")
    answer = client.post("/v1/embeddings", json={**asked, "model": "third"})
    refused(answer, "this server has 'tiny', 'org/other'", "model", 404)
    assert vectors(client.post("/embed?model=org/other", json={"inputs": "x"})).shape[0] == 1
    told = client.get("/metrics").text
    assert 'rayembed_texts_total{model="tiny"} 6\n' in told
    assert 'rayembed_texts_total{model="org/other"} 7\n' in told
    assert told.count("# TYPE rayembed_texts_total counter") == 1


class Handle:
    """A Serve handle to a service in this process: results are tasks that can be cancelled."""

    def __init__(self, service):
        self.service, self.cancelled = service, 0

    def __getattr__(self, method):
        return type("Method", (), {"remote": lambda _, *args: Response(self, method, args)})()


class Response:
    def __init__(self, handle, method, args):
        self.handle, self.method, self.args = handle, method, args

    def __await__(self):
        return self._result().__await__()

    async def _result(self):
        try:
            return await getattr(self.handle.service, self.method)(*self.args)
        except ServiceError as error:
            return pickle.loads(pickle.dumps(error))

    def cancel(self):
        self.handle.cancelled += 1


def test_a_model_in_another_process_answers_as_one_here(model):
    handle = Handle(EmbeddingService("tiny", model, limits=Limits(texts=2)))
    client = TestClient(make_app({"tiny": RemoteService(handle)}, Limits(body_bytes=200)))
    found = vectors(client.post("/v1/embeddings", json={"input": TEXTS[:2]}))
    np.testing.assert_allclose(found, encode(model, TEXTS[:2], role="document"), atol=1e-6)
    refused(client.post("/v1/embeddings", json={"input": ["a"] * 3}), "allowed: 2", "input", 413)
    refused(client.post("/v1/embeddings", json={"input": "a" * 300}), "200 bytes", None, 413)
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/health").json() == {"status": "ready"}


def test_a_request_that_takes_too_long_is_given_up_in_the_other_process(model, monkeypatch):
    service = EmbeddingService("tiny", model)
    handle = Handle(service)

    async def never(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(service, "answer", never)
    app = make_app({"tiny": RemoteService(handle)}, Limits(request_seconds=0.1))

    async def talk():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/v1/embeddings", json={"input": "a"})

    assert asyncio.run(talk()).status_code == 504
    assert handle.cancelled == 1


def test_a_model_that_does_not_tell_its_state_is_failing(model, monkeypatch):
    monkeypatch.setattr("rayembed_extras.serving.app._STATE_SECONDS", 0.05)
    good, bad = EmbeddingService("good", model), EmbeddingService("bad", model)
    client = client_of(good, bad)
    assert client.get("/health").status_code == 200

    async def away():
        await asyncio.sleep(60)

    monkeypatch.setattr(bad, "state", away)
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["models"]) == (503, ["bad"])
    assert 'model="good"' in client.get("/metrics").text
    assert 'model="bad"' not in client.get("/metrics").text

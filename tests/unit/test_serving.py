"""The server without Ray: its batches, its answers, what it refuses."""

import asyncio
import base64
import threading

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny_folders import save_nvembed

from rayembed.config.serving import Limits
from rayembed.models.encoding import encode
from rayembed.models.load import load_model
from rayembed.serving.app import digest, make_app
from rayembed.serving.batcher import Batcher
from rayembed.serving.service import EmbeddingService

TEXTS = ["Paris is the capital of France", "the quick brown fox", "7 wonders"]
SMALL = Limits(texts=3, characters=100, body_bytes=4000, waiting_texts=5)


class Gate:
    """Work that waits until it is let go, and remembers its batches."""

    def __init__(self):
        self.batches = []
        self.first_runs = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, items):
        self.batches.append(list(items))
        self.first_runs.set()
        assert self.go_on.wait(30)
        if "bad" in items:
            raise ValueError("a bad item")
        return [item.upper() for item in items]


async def several(batcher, gate, items):
    """All results, where the first item is under way before the others come."""
    tasks = [asyncio.create_task(batcher(*items[0]))]
    await asyncio.to_thread(gate.first_runs.wait, 30)
    tasks += [asyncio.create_task(batcher(*item)) for item in items[1:]]
    await asyncio.sleep(0)
    gate.go_on.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_what_waits_goes_together_in_order_up_to_the_budget():
    gate = Gate()
    batcher = Batcher(gate, largest_batch=10)
    items = [("a", 1), ("b", 6), ("c", 4), ("d", 1), ("e", 50), ("f", 2)]
    results = asyncio.run(several(batcher, gate, items))
    assert results == ["A", "B", "C", "D", "E", "F"]
    # A lone item goes at once; one that is larger than a batch goes alone and is not overtaken.
    assert gate.batches == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]


def test_without_a_budget_each_goes_alone():
    gate = Gate()
    results = asyncio.run(several(Batcher(gate, largest_batch=1), gate, [(c, 1) for c in "abc"]))
    assert results == ["A", "B", "C"]
    assert gate.batches == [["a"], ["b"], ["c"]]


def test_an_error_reaches_only_the_caller_whose_item_it_is():
    gate = Gate()
    items = [("a", 1), ("b", 1), ("bad", 1), ("c", 1)]
    results = asyncio.run(several(Batcher(gate, largest_batch=10), gate, items))
    assert [str(result) for result in results] == ["A", "B", "a bad item", "C"]


def test_a_caller_that_went_away_is_not_worked_for():
    gate = Gate()
    batcher = Batcher(gate, largest_batch=10)

    async def run():
        first = asyncio.create_task(batcher("a", 1))
        await asyncio.to_thread(gate.first_runs.wait, 30)
        gone, stays = asyncio.create_task(batcher("b", 1)), asyncio.create_task(batcher("c", 1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        gate.go_on.set()
        return await first, await stays

    assert asyncio.run(run()) == ("A", "C")
    assert gate.batches == [["a"], ["c"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(save_nvembed(tmp_path_factory.mktemp("served") / "model"))


@pytest.fixture
def service(model):
    made = EmbeddingService("tiny", lambda: model, source="models:/tiny/3", limits=SMALL)
    made.start_loading().join()
    return made


@pytest.fixture
def client(service):
    with TestClient(make_app(service)) as found:
        yield found


def vectors(answer):
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]], dtype=np.float32)


def test_answers_are_those_of_the_encoder(client, model):
    body = {"input": TEXTS, "model": "tiny", "user": "u", "encoding_format": None}
    answer = client.post("/v1/embeddings", json=body)
    np.testing.assert_allclose(vectors(answer), encode(model, TEXTS, role="document"), atol=1e-6)
    told = client.post("/v1/embeddings", json={**body, "role": "query", "instruction": "find"})
    wanted = encode(model, TEXTS, role="query", instruction="find")
    np.testing.assert_allclose(vectors(told), wanted, atol=1e-6)
    assert np.abs(vectors(told) - vectors(answer)).max() > 1e-3
    # The instruction is read, too.
    assert told.json()["usage"]["prompt_tokens"] > answer.json()["usage"]["prompt_tokens"]
    tokens = model.tokenizer(TEXTS, "document")
    assert answer.json()["usage"]["prompt_tokens"] == sum(len(t["input_ids"]) for t in tokens)
    assert answer.json()["model"] == "tiny"


def test_base64_and_dimensions(client, model, monkeypatch):
    monkeypatch.setattr(model, "dimensions", (32, 8))
    packed = client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"})
    text = packed.json()["data"][0]["embedding"]
    plain = vectors(client.post("/v1/embeddings", json={"input": TEXTS[0]}))
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), plain[0])
    cut = vectors(client.post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 8}))
    np.testing.assert_allclose(cut[0], plain[0, :8] / np.linalg.norm(plain[0, :8]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "message", "field"),
    [
        ({"input": []}, 400, "list of texts, not empty", "input"),
        ({}, 400, "list of texts, not empty", "input"),
        ({"input": [[1, 2]]}, 400, "token numbers are not taken", "input"),
        ({"input": "x", "role": "passage"}, 400, "allowed: query, document", "role"),
        ({"input": "x", "dimensions": 5}, 400, "this model has [32]", "dimensions"),
        ({"input": "x", "model": "other"}, 404, "this server has 'tiny'", "model"),
        ({"input": ["x"] * 4}, 413, "4 texts in one request; allowed: 3", "input"),
        ({"input": ["x", "y" * 101]}, 413, "input[1] has 101 characters; allowed: 100", "input"),
        ({"input": "x", "user": "u" * 5000}, 413, "larger than 4000 bytes", None),
        ({"input": "x", "instruction": "a b " * 600}, 400, "leaves none of query_max", "input"),
        ([1], 400, "must be a JSON object, found list", None),
    ],
)
def test_wrong_requests_are_refused_as_openai_refuses(client, body, status, message, field):
    if isinstance(body, dict) and "instruction" in body:
        body = {**body, "role": "query"}
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    # And the server goes on.
    assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 200


def test_other_paths_and_bodies(client):
    assert client.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    assert client.get("/v1/embeddings").status_code == 405
    broken = client.post("/v1/embeddings", content=b"{")
    assert broken.status_code == 400
    assert "not JSON" in broken.json()["error"]["message"]


def test_models_and_health(client):
    listed = client.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    assert listed["data"][0]["dimensions"] == [32]
    assert listed["data"][0]["source"] == "models:/tiny/3"
    assert client.get("/v1/models/tiny").json() == listed["data"][0]
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json()["status"] == "ready"


def test_a_model_that_loads_or_cannot_be_loaded_is_told(model):
    go_on = threading.Event()

    def slow():
        assert go_on.wait(30)
        return model

    service = EmbeddingService("tiny", slow)
    loading = service.start_loading()
    with TestClient(make_app(service)) as client:
        early = client.post("/v1/embeddings", json={"input": "x"})
        assert (early.status_code, early.headers["Retry-After"]) == (503, "2")
        assert early.json()["error"]["message"] == "the model is being loaded"
        assert client.get("/health").status_code == 503
        go_on.set()
        loading.join()
        assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 200

    def broken():
        raise OSError("no space left")

    service = EmbeddingService("tiny", broken)
    service.start_loading().join()
    with TestClient(make_app(service)) as client:
        answer = client.post("/v1/embeddings", json={"input": "x"})
        assert answer.status_code == 503
        assert "no space left" in answer.json()["error"]["message"]
        assert client.get("/health").json()["failure"] == "no space left"


def test_a_token_is_asked_for_where_one_is_set(service):
    with TestClient(make_app(service, key_digest=digest("geheim"))) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic geheim"}):
            for answer in (
                client.post("/v1/embeddings", json={"input": "x"}, headers=headers),
                client.get("/v1/models", headers=headers),
                client.get("/v1/models/tiny", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer geheim"}
        assert (
            client.post("/v1/embeddings", json={"input": "x"}, headers=headers).status_code == 200
        )
        assert client.get("/health").status_code == 200


def test_requests_that_wait_together_are_embedded_together(model):
    """Nine requests in three ways while the first is under way: four calls, the same vectors."""
    service = EmbeddingService("tiny", lambda: model)
    service.start_loading().join()
    under_way, go_on = threading.Event(), threading.Event()
    forward = model.forward

    def held(*arguments):
        under_way.set()
        assert go_on.wait(30)
        return forward(*arguments)

    ways = [{"role": "query"}, {"role": "query", "instruction": "find"}, {}]
    bodies = [
        {"input": [f"{text} {i}" for text in TEXTS[: i % 3 + 1]], **ways[i % 3]} for i in range(9)
    ]

    async def run():
        first = asyncio.create_task(service.answer({"input": "first"}))
        await asyncio.to_thread(under_way.wait, 30)
        tasks = [asyncio.create_task(service.answer(body)) for body in bodies]
        while service.counts.requests < 10:
            await asyncio.sleep(0.01)
        go_on.set()
        await first
        return [await task for task in tasks]

    model.forward = held
    try:
        together = asyncio.run(run())
    finally:
        model.forward = forward
    assert service.counts.batches == 1 + 3
    assert service.counts.texts == 1 + sum(len(body["input"]) for body in bodies)
    for body, answer in zip(bodies, together, strict=True):
        found = [item["embedding"] for item in answer["data"]]
        alone = encode(
            model,
            body["input"],
            role=body.get("role", "document"),
            instruction=body.get("instruction", ""),
        )
        np.testing.assert_allclose(found, alone, atol=1e-6)


def test_a_full_queue_is_told(model):
    service = EmbeddingService("tiny", lambda: model, limits=SMALL)
    service.start_loading().join()
    service._waiting_texts = 4
    with TestClient(make_app(service)) as client:
        assert client.post("/v1/embeddings", json={"input": ["x"]}).status_code == 200
        answer = client.post("/v1/embeddings", json={"input": ["x", "y"]})
    assert answer.status_code == 503
    assert "4 texts wait already" in answer.json()["error"]["message"]
    assert service._waiting_texts == 4

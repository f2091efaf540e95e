"""Vectors for an index: which answers name it, in which number type documents are computed, and a
store that does not return.
"""

import asyncio
import threading

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from made_up_index import build, settings, write
from made_up_index import documents as made_up
from tiny_folders import save_tiny

import rayembed
from rayembed_extras.index_upgrades.switch import open_store
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.manifest import changed_table, read_manifest, write_manifest
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.settings import Limits, ServedModel

QUERY = "foxes in the capital"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model of widths 32 and 16, and an index of 16 dimensions."""
    home = tmp_path_factory.mktemp("served")
    save_tiny("nomic-moe", home / "model")
    write(home / "documents.jsonl", made_up(30))
    run = settings(home / "outputs", home / "model", home / "documents.jsonl", model__dimensions=16)
    build_index(run)
    return home


def app_of(home, limits):
    served = ServedModel(name="m", model=str(home / "model"), use_gpu=False, index="docs")
    return make_app({"m": on_ray.load(served, limits, None, str(home / "outputs"))}, limits)


FITTING = [
    ("float32", {}),
    ("float32", {"role": "query"}),
    ("float32", {"dimensions": 16}),
    ("float32", {"encoding_format": "base64"}),
    ("float32", {"instruction": ""}),
    ("float16", {}),
    ("int8", {"encoding_format": "int8"}),
    ("bits", {"encoding_format": "ubinary"}),
]
OTHERS = [
    ("float32", {"dimensions": 32}),
    ("float32", {"encoding_format": "int8"}),
    ("float32", {"instruction": "find foxes"}),
    ("float32", {"instruction": "find foxes", "role": "query"}),
    ("int8", {}),
    ("int8", {"encoding_format": "uint8"}),
    ("bits", {}),
    ("bits", {"encoding_format": "binary"}),
]


@pytest.mark.parametrize(
    ("number_type", "options", "fits"),
    [(*one, True) for one in FITTING] + [(*one, False) for one in OTHERS],
)
def test_the_header_names_the_index_only_of_vectors_that_fit(home, number_type, options, fits):
    storage = str(home / "outputs")
    kept = read_manifest(storage, "docs")
    made = kept.tables["docs_1"].made_by.model_copy(update={"number_type": number_type})
    write_manifest(storage, changed_table(kept, "docs_1", made_by=made))
    client = TestClient(app_of(home, Limits()))
    write_manifest(storage, kept)
    answer = client.post("/v1/embeddings", json={"input": QUERY, **options})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("X-Index") == ("docs; table=docs_1" if fits else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_are_computed_in_the_number_type_of_the_index(home, tmp_path, dtype):
    run = settings(tmp_path, home / "model", home / "documents.jsonl", model__dtype=dtype)
    _, rows = build(run)
    plain = rayembed.load(home / "model")
    loaded = rayembed.load(home / "model", for_index="docs", output=tmp_path)
    texts = [row["text"] for row in made_up(30)]
    wanted = np.array([rows[row["id"]]["vector"] for row in made_up(30)], np.float32)
    np.testing.assert_allclose(loaded.encode_document(texts), wanted, atol=1e-3)
    away = np.abs(plain.encode_document(texts) - wanted).mean()
    near = np.abs(loaded.encode_document(texts) - wanted).mean()
    assert near < 1e-6 if dtype == "float32" else near < away / 3
    assert np.array_equal(loaded.encode_query(texts), plain.encode_query(texts))


def test_a_store_that_does_not_return_keeps_no_other_request_waiting(home, monkeypatch):
    """More searches than threads of the event loop; later ones connect again."""
    limits = Limits(request_seconds=3.0)
    app = app_of(home, limits)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://t")
    tables = type(open_store(read_manifest(str(home / "outputs"), "docs")))
    plain, ended = tables.search, threading.Event()
    monkeypatch.setattr(tables, "search", lambda *_: ended.wait(60))

    async def ask():
        stuck = [client.post("/search", json={"query": QUERY}) for _ in range(40)]
        stuck = [asyncio.ensure_future(one) for one in stuck]
        await asyncio.sleep(0.5)
        for _ in range(3):
            answer = await client.post("/v1/embeddings", json={"input": QUERY})
            assert answer.status_code == 200, answer.text
        assert (await client.get("/health")).status_code == 200
        assert not any(one.done() for one in stuck), "the control"
        for one in await asyncio.gather(*stuck):
            assert one.status_code == 504, one.text
            assert "longer than 3 seconds" in one.text
        monkeypatch.setattr(tables, "search", plain)
        await asyncio.sleep(0.2)
        answer = await client.post("/search", json={"query": QUERY, "k": 2})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"][0]["results"]) == 2

    try:
        asyncio.run(ask())
    finally:
        ended.set()

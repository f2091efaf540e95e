"""A served model and its index: vectors that belong to it, `/search`, and refusals."""

import asyncio
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from made_up_index import sentences, settings, write
from tiny_models import save_encoder

import rayembed
from rayembed.errors import ConfigError, StorageError
from rayembed.evaluation.hybrid import fused
from rayembed.search.bm25_library import bm25s
from rayembed_extras.index_upgrades import named_index
from rayembed_extras.index_upgrades.job import run_upgrade_job
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.manifest import read_manifest, write_manifest
from rayembed_extras.indexing.table_search import WordIndex
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.job import pin, run_serve_job
from rayembed_extras.serving.settings import Limits, ServedModel

COUNT = 150
QUERY = "foxes in the capital"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Documents, two models of other widths, and an index of the old one in LanceDB."""
    home = tmp_path_factory.mktemp("served")
    save_encoder(home / "old", seed=0)
    save_encoder(home / "new", seed=1, hidden_size=48)
    write(home / "documents.jsonl", sentences(COUNT))
    return home


@pytest.fixture(scope="module")
def built(home):
    storage = home / "outputs"
    run = settings(
        storage, home / "old", home / "documents.jsonl", rows_per_part=1000, store__kind="lance"
    )
    return build_index(run)


@pytest.fixture(scope="module")
def adapted(home, built):
    """The index with an adapter for the new model."""
    words = ["--name", "docs", "--model", str(home / "new"), "--road", "adapter"]
    words += ["--set", "maps=[affine]", "--set", f"placement.storage_path={home / 'outputs'}"]
    assert run_upgrade_job([*words, "--set", "placement.runtime=local"]) == 0
    return built


@pytest.fixture(autouse=True)
def record(home, built):
    """Each test leaves the record as it was."""
    kept = read_manifest(str(home / "outputs"), "docs")
    yield
    if read_manifest(str(home / "outputs"), "docs") != kept:
        write_manifest(str(home / "outputs"), kept)


def served(home, model="old", *, limits=None, **changes):
    served = ServedModel(
        name="m", model=str(home / model), use_gpu=False, **{"index": "docs", **changes}
    )
    limits = limits or Limits()
    service = on_ray.load(served, limits, None, str(home / "outputs"))
    return TestClient(make_app({"m": service}, limits))


@pytest.fixture(scope="module")
def client(home, built):
    return served(home)


def rows_of(answer):
    assert answer.status_code == 200, answer.text
    return [one["results"] for one in answer.json()["data"]]


def vectors_of(answer):
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)


def refused(answer, message, field=None, status=400):
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field


def test_a_search_returns_the_nearest_rows_with_texts_and_metadata(home, built, client):
    texts = [QUERY, "ancient paris 7", QUERY]
    answer = client.post("/search", json={"query": texts, "k": 5})
    found = rows_of(answer)
    body = answer.json()
    assert (body["model"], body["index"], body["table"]) == ("m", "docs", "docs_1")
    assert (body["mode"], body["truncated"]) == ("dense", [])
    assert body["usage"]["prompt_tokens"] > 0
    assert answer.headers["X-Index"] == "docs; table=docs_1"
    assert [one["query"] for one in body["data"]] == [0, 1, 2]
    assert found[0] == found[2]
    rows = {row["id"]: row for row in sentences(COUNT)}
    model = rayembed.load(home / "old")
    scores = model.similarity(texts, [row["text"] for row in rows.values()])
    for of_query, row in zip(found, scores, strict=True):
        best = np.sort(row)[::-1][:5]
        np.testing.assert_allclose([hit["score"] for hit in of_query], best, atol=1e-5)
        for hit in of_query:
            wanted = rows[hit["id"]]
            assert hit["text"] == wanted["text"]
            assert hit["metadata"] == {"year": wanted["year"], "lang": wanted["lang"]}
            assert (hit["document"], hit["chunk"]) == (wanted["id"], 0)
    assert rows_of(client.post("/search", json={"query": QUERY, "k": 5}))[0] == found[0]
    assert len(rows_of(client.post("/search?model=m:query", json={"query": QUERY}))[0]) == 10
    assert len(rows_of(client.post("/search", json={"query": QUERY, "k": 999}))[0]) == COUNT


def test_hybrid_search_is_rank_fusion_of_vectors_and_words(client):
    """Of both rankings as the evaluation fuses them, by mteb's function."""
    asked = {"query": QUERY, "k": 10, "mode": "hybrid"}
    (found,) = rows_of(client.post("/search", json=asked))
    (near,) = rows_of(client.post("/search", json={"query": QUERY, "k": 100}))
    corpus = sentences(COUNT)
    words = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    words.index(
        bm25s.tokenize([row["text"] for row in corpus], stopwords="en", show_progress=False),
        show_progress=False,
    )
    ranked = WordIndex(np.array([row["id"] for row in corpus], dtype=object), words)(QUERY, 100)
    assert 5 < len(ranked) <= 100
    both = fused(
        [
            {hit["id"]: hit["score"] for hit in near},
            {name: 1 / rank for rank, name in enumerate(ranked, start=1)},
        ],
        10,
    )
    np.testing.assert_allclose([hit["score"] for hit in found], list(both.values()), atol=1e-9)
    ours = [hit["id"] for hit in found]
    assert ours != [hit["id"] for hit in near[:10]], "the control"
    assert len({*ours} & {*both}) >= 9  # equal sums may stand in another order


def test_words_alone_bring_a_document_up(client):
    """A number that one document has is no vector's business, but BM25's."""
    asked = {"query": "77", "k": 2}
    dense, hybrid = (
        rows_of(client.post("/search", json={**asked, "mode": mode}))[0]
        for mode in ("dense", "hybrid")
    )
    assert "d77" in [hit["id"] for hit in hybrid]
    assert [hit["id"] for hit in dense] != [hit["id"] for hit in hybrid]


def test_hybrid_search_of_a_large_index_needs_a_full_text_index_of_the_store(home, built):
    client = served(home, limits=Limits(bm25_rows=COUNT - 1))
    asked = {"query": "77", "k": 2, "mode": "hybrid"}
    refused(client.post("/search", json=asked), "for at most 149 (limits.bm25_rows)", "mode")
    assert len(rows_of(client.post("/search", json={**asked, "mode": "dense"}))[0]) == 2
    import lancedb
    import lancedb.index

    folder = home / "outputs" / "indexes" / "docs" / "store"
    table = lancedb.connect(folder).open_table("docs_1")
    table.create_index("text", config=lancedb.index.FTS())
    try:
        found = rows_of(client.post("/search", json=asked))[0]
        assert "d77" in [hit["id"] for hit in found]
    finally:
        table.drop_index("text_idx")


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        ({}, "'query' must be a text or a list", "query"),
        ({"query": [QUERY, 1]}, "query[1] = 1 must be a text", "query"),
        ({"query": ""}, "is an empty text", "query"),
        ({"query": QUERY, "k": 0}, "from 1 to 1000 (limits.results)", "k"),
        ({"query": QUERY, "k": True}, "from 1 to 1000", "k"),
        ({"query": QUERY, "k": 1001}, "from 1 to 1000", "k"),
        ({"query": QUERY, "mode": "words"}, "allowed: dense, hybrid", "mode"),
        ({"query": QUERY, "mode": ["dense"]}, "allowed: dense, hybrid", "mode"),
        ({"query": QUERY, "filter": {"year": 1}}, "filter is not offered", "filter"),
        ({"query": QUERY, "dimensions": 32}, "dimensions is not offered", "dimensions"),
        ({"query": QUERY, "model": "m:document"}, "a search embeds queries", "role"),
        ({"query": QUERY, "role": "document"}, "a search embeds queries", "role"),
        ({"query": "a " * 100, "truncate": False}, "leave out truncate=false", "query"),
    ],
)
def test_wrong_searches_are_refused(client, body, message, field):
    refused(client.post("/search", json=body), message, field)


def test_limits_hold_for_searches_too(home, built):
    client = served(home, limits=Limits(texts=2, results=3))
    refused(client.post("/search", json={"query": [QUERY] * 3}), "allowed: 2", "query", 413)
    refused(client.post("/search", json={"query": QUERY, "k": 4}), "from 1 to 3", "k")
    refused(client.post("/search", json={"query": QUERY, "model": "x"}), "no model", "model", 404)


def test_a_model_without_an_index_says_how_to_give_it_one(home, built):
    client = served(home, index=None)
    refused(client.post("/search", json={"query": QUERY}), "models.m.index=INDEX", "model")
    assert client.get("/v1/models").json()["data"][0]["indexes"] == []
    answer = client.post("/v1/embeddings", json={"input": QUERY})
    assert "X-Index" not in answer.headers


def test_the_list_of_models_names_the_index(home, adapted):
    (entry,) = served(home).get("/v1/models").json()["data"]
    (index,) = entry["indexes"]
    assert index == {
        "name": "docs",
        "table": "docs_1",
        "rows": COUNT,
        "dimensions": 32,
        "made_by": str(home / "old"),
        "adapter": None,
        "serves": True,
    }
    (entry,) = served(home, "new").get("/v1/models/m").json()["indexes"]
    assert (entry["adapter"], entry["dimensions"]) == ("affine", 32)


def test_an_adapter_maps_queries_alone(home, adapted):
    client = served(home, "new")
    assert client.get("/health").json() == {"status": "ready"}
    answer = client.post("/v1/embeddings", json={"input": [QUERY], "model": "m:query"})
    found = vectors_of(answer)
    assert answer.headers["X-Index"] == "docs; table=docs_1; adapter=affine"
    model = rayembed.load(home / "new", for_index="docs", output=home / "outputs")
    wanted = model.encode_query([QUERY])
    assert wanted.shape == (1, 32)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    plain = rayembed.load(home / "new").encode_query([QUERY])
    assert plain.shape == (1, 48), "the control"
    asked = {"inputs": QUERY, "prompt_name": "query"}
    np.testing.assert_allclose(client.post("/embed", json=asked).json(), wanted, atol=1e-6)
    for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs")):
        refused(client.post(path, json={field: QUERY}), "adapter (affine) for queries", "role")
    asked = {"input": QUERY, "role": "query", "dimensions": 48}
    refused(client.post("/v1/embeddings", json=asked), "leave dimensions out", "dimensions")
    # A ranking compares its texts with each other, by the model as it is.
    asked = {"query": QUERY, "texts": ["foxes", "the capital"], "raw_scores": True}
    without = served(home, "new", index=None)
    ranked = client.post("/rerank", json=asked)
    assert ranked.status_code == 200
    assert ranked.json() == without.post("/rerank", json=asked).json()


def test_a_search_by_an_adapter_finds_what_the_mapped_query_is_near_to(home, built, adapted):
    client = served(home, "new")
    (found,) = rows_of(client.post("/search", json={"query": QUERY, "k": 5}))
    query = rayembed.load(home / "new", for_index="docs", output=home / "outputs")
    texts = [row["text"] for row in sentences(COUNT)]
    rows = rayembed.load(home / "old").encode_document(texts)
    best = np.sort(rows @ query.encode_query(QUERY))[::-1][:5]
    np.testing.assert_allclose([hit["score"] for hit in found], best, atol=1e-5)


def test_a_model_without_an_adapter_is_not_ready_and_answers_nothing_of_the_index(
    home, built, tmp_path, caplog
):
    save_encoder(tmp_path / "third", seed=3)
    client = served(home, tmp_path / "third")
    assert "m is not ready: the index 'docs' was made by" in caplog.text
    health = client.get("/health")
    assert health.status_code == 503
    assert "has no adapter for a model" in health.json()["models"]["m"]
    assert "rayembed upgrade --name docs" in health.json()["models"]["m"]
    for path, body in (("/search", {"query": QUERY}), ("/v1/embeddings", {"input": QUERY})):
        refused(client.post(path, json=body), "the index 'docs' was made by", None, 503)
    assert client.post("/rerank", json={"query": "a", "texts": ["b"]}).status_code == 200
    (index,) = client.get("/v1/models").json()["data"][0]["indexes"]
    assert (index["name"], index["serves"]) == ("docs", False)
    assert "has no adapter" in index["problem"]


def test_a_server_follows_the_record(home, built, adapted, monkeypatch):
    """An adapter that is recorded later, and a switch to a table of this very model."""
    storage = str(home / "outputs")
    with_adapter = read_manifest(storage, "docs")
    table = with_adapter.tables["docs_1"]
    bare = table.model_copy(update={"adapter": None})
    write_manifest(storage, with_adapter.model_copy(update={"tables": {"docs_1": bare}}))
    client = served(home, "new")
    assert client.get("/health").status_code == 503
    write_manifest(storage, with_adapter)
    assert client.get("/health").status_code == 503, "within the seconds of a reading"
    monkeypatch.setattr(named_index, "REFRESH_SECONDS", 0.0)
    assert client.get("/health").status_code == 200
    weights = next(iter(table.adapter))
    made = table.made_by.model_copy(update={"weights": weights, "dimensions": 48})
    tables = {"docs_1": table, "docs_2": table.model_copy(update={"made_by": made})}
    switched = {"tables": tables, "current": "docs_2", "before": "docs_1"}
    write_manifest(storage, with_adapter.model_copy(update=switched))
    answer = client.post("/v1/embeddings", json={"input": QUERY, "role": "document"})
    assert vectors_of(answer).shape == (1, 48)
    assert answer.headers["X-Index"] == "docs; table=docs_2"


def test_a_store_that_does_not_answer_costs_the_search_alone(home, built, monkeypatch):
    client = served(home)
    tables = type(built.open())
    plain = tables.search

    def away(*_):
        raise StorageError("the disk is away")

    monkeypatch.setattr(tables, "search", away)
    refused(
        client.post("/search", json={"query": QUERY}),
        "the index 'docs' cannot be searched: the disk is away",
        None,
        503,
    )
    assert client.get("/health").status_code == 200
    monkeypatch.setattr(tables, "search", plain)
    assert rows_of(client.post("/search", json={"query": QUERY}))


def test_settings_of_the_index_decide_width_and_instruction(home, built, monkeypatch):
    storage = str(home / "outputs")
    manifest = read_manifest(storage, "docs")
    table = manifest.tables["docs_1"]
    made = table.made_by.model_copy(update={"query_instruction": "the capital", "instruction": "7"})
    changed = {"tables": {"docs_1": table.model_copy(update={"made_by": made})}}
    write_manifest(storage, manifest.model_copy(update=changed))
    client, plain = served(home), served(home, index=None)
    for role, own in (("query", "the capital"), ("document", "7")):
        asked = {"input": QUERY, "role": role}
        found = vectors_of(client.post("/v1/embeddings", json=asked))
        wanted = vectors_of(plain.post("/v1/embeddings", json={**asked, "instruction": own}))
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        bare = vectors_of(plain.post("/v1/embeddings", json=asked))
        assert np.abs(found - bare).max() > 1e-3, "the control"
        stated = vectors_of(client.post("/v1/embeddings", json={**asked, "instruction": ""}))
        np.testing.assert_allclose(stated, bare, atol=1e-6)
    loaded = rayembed.load(home / "old", for_index="docs", output=home / "outputs")
    found = vectors_of(client.post("/v1/embeddings", json={"input": QUERY, "role": "query"}))
    np.testing.assert_allclose(loaded.encode_query([QUERY]), found, atol=1e-6)


def test_a_server_of_an_index_that_is_not_there_does_not_start(home, built):
    words = ["--model", f"m={home / 'old'}", "--set", f"storage_path={home / 'outputs'}"]
    config = run_serve_job.resolve([*words, "--set", "models.m.index=dox"])[0]
    with pytest.raises(ConfigError, match="there is no index 'dox'"):
        pin(config)
    config = pin(run_serve_job.resolve([*words, "--set", "models.m.index=docs"])[0])
    assert config.storage_path == str(home / "outputs")
    with pytest.raises(ConfigError, match=r"models\.m\.index"):
        run_serve_job.resolve([*words, "--set", "models.m.index=a/b"])


def test_a_loaded_model_belongs_to_its_index(home, adapted, tmp_path):
    outputs = home / "outputs"
    own = rayembed.load(home / "old", for_index="docs", output=outputs)
    plain = rayembed.load(home / "old")
    assert np.array_equal(own.encode_document(["foxes", QUERY]), plain.encode(["foxes", QUERY]))
    assert np.array_equal(own.encode_query(QUERY), plain.encode_query(QUERY))
    other = rayembed.load(home / "new", for_index="docs", output=outputs)
    assert other.encode_query(QUERY).shape == (32,)
    assert other.encode_query([]).shape == (0, 32)
    assert "width 32" in repr(other)
    with pytest.raises(ConfigError, match="its documents do not belong to this index"):
        other.encode_document(["foxes"])
    with pytest.raises(ConfigError, match="its documents do not belong to this index"):
        other.similarity(QUERY, ["foxes"])
    with pytest.raises(ConfigError, match="there is no index 'x'"):
        rayembed.load(home / "old", for_index="x", output=outputs)
    save_encoder(tmp_path / "third", seed=3)
    with pytest.raises(ConfigError, match="has no adapter"):
        rayembed.load(tmp_path / "third", for_index="docs", output=outputs)


def test_filters_are_set_in_the_stores_client(home, built, client):
    """By the line of docs/serving.md."""
    import lancedb

    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(table\.search\([^`]+)`", page)
    vector = vectors_of(client.post("/v1/embeddings", json={"input": QUERY, "role": "query"}))[0]
    table = lancedb.connect(home / "outputs" / "indexes" / "docs" / "store").open_table("docs")
    found = eval(f"{line}.to_list()", {"table": table, "vector": vector})
    hits = rows_of(client.post("/search", json={"query": QUERY, "k": COUNT}))[0]
    late = [hit["id"] for hit in hits if hit["metadata"]["year"] >= 1990]
    assert [row["id"] for row in found] == late[:5]
    assert late[:5] != [hit["id"] for hit in hits[:5]], "the control"


def test_many_searches_at_once_are_right(home, built):
    """Requests share a store and an index of words."""
    client = served(home)
    asked = [
        {"query": f"paris {i}", "k": 3, "mode": mode}
        for i in range(12)
        for mode in ("dense", "hybrid")
    ]

    async def at_once():
        transport = httpx.ASGITransport(app=served(home).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            return await asyncio.gather(*(http.post("/search", json=body) for body in asked))

    found = [rows_of(answer) for answer in asyncio.run(at_once())]
    assert found == [rows_of(client.post("/search", json=body)) for body in asked]

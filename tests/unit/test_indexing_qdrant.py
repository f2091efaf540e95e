"""The store `qdrant`, beyond the contract of all stores (`test_indexing_stores.py`): types of
metadata, the folder of one process, and the requests that a server gets.
"""

import datetime
import decimal
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("qdrant_client")

from qdrant_server import qdrant_server

from rayembed.config.settings import parse
from rayembed.errors import ConfigError, StorageError, StorageFullError
from rayembed_extras.indexing.store import Layout
from rayembed_extras.indexing.stores.qdrant import QdrantStore

D = 8
KEY = "secret-key-of-a-test"


def settings_of(to, **values):
    return parse(QdrantStore, {"kind": "qdrant", "to": str(to), **values})


def layout_of(number_type="float32", dimensions=D, metadata=None):
    return Layout(dimensions, number_type, metadata or {"topic": pa.string()})


def rows_of(ids, seed=0, **metadata):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(len(ids), D)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    metadata = metadata or {"topic": ["t"] * len(ids)}
    columns = {
        "id": ids,
        "document": ids,
        "chunk": [0] * len(ids),
        "text": [f"text of {name}" for name in ids],
        **metadata,
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), D),
    }
    layout = layout_of(metadata={name: pa.array(v).type for name, v in metadata.items()})
    return pa.table(columns, schema=layout.schema)


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"number_type": "int8"}, "quantization_config={scalar: {type: int8, always_ram: true}}"),
        ({"number_type": "bits"}, "quantization_config={binary: {always_ram: true}}"),
        ({"to": ":memory:"}, "or a local folder"),
        ({"to": "grpc://host:6334"}, "or a local folder"),
        ({"key_from": KEY}, "never into settings"),
        ({"to": f"https://:{KEY}@host"}, "password"),
        ({"to": f"https://host?api_key={KEY}"}, "api_key"),
    ],
)
def test_settings_that_qdrant_does_not_know_are_refused(values, words):
    message = refusal(parse, QdrantStore, {"kind": "qdrant", **values})
    assert words in message
    assert KEY not in message


@pytest.mark.parametrize(
    ("values", "layout", "name", "words"),
    [
        ({"index": {"hnsw_config": {"m": 16, "depth": 3}}}, layout_of(), "docs", "depth"),
        ({"index": {"speed": 3}}, layout_of(), "docs", "speed"),
        ({"index": {"vectors": 3}}, layout_of(), "docs", "vectors"),
        ({"index": {"quantization_config": {"scalar": {"type": "int4"}}}}, layout_of(), "docs",
         "store.index"),
        ({"payload_indexes": {"absent": "keyword"}}, layout_of(), "docs", "topic"),
        ({"payload_indexes": {"topic": "words"}}, layout_of(), "docs", "payload_indexes.topic"),
        ({}, layout_of(dimensions=65_537), "docs", "65,536"),
        ({}, layout_of(), "n" * 251, "255"),
    ],
)  # fmt: skip
def test_check_refuses_what_qdrant_would_refuse_later(tmp_path, values, layout, name, words):
    store = settings_of(tmp_path, **values).open()
    assert words in refusal(store.check, layout, name)
    store.close()


def test_every_type_of_metadata_comes_back(tmp_path):
    moment = datetime.datetime(2024, 2, 29, 12, 0, 1, 5, tzinfo=datetime.UTC)
    plain = moment.replace(tzinfo=None)
    columns = {
        "word": (pa.dictionary(pa.int32(), pa.string()), ["a", None]),
        "large": (pa.int64(), [2**62, None]),
        "half": (pa.float16(), [np.float16(0.5), None]),
        "yes": (pa.bool_(), [True, None]),
        "day": (pa.date32(), [datetime.date(1582, 1, 2), None]),
        "at": (pa.timestamp("us", "Europe/Berlin"), [moment, None]),
        "local": (pa.timestamp("ms"), [plain.replace(microsecond=0), None]),
        "price": (pa.decimal128(9, 2), [decimal.Decimal("3.10"), None]),
        "raw": (pa.binary(), [b"\0\xff", None]),
        "tags": (pa.list_(pa.string()), [["a", None, ""], []]),
        "nested": (
            pa.struct({"a": pa.list_(pa.timestamp("us")), "b": pa.binary()}),
            [{"a": [plain], "b": b"x"}, None],
        ),
        "pairs": (pa.map_(pa.string(), pa.int32()), [[("k", 1)], None]),
        "clock": (pa.time64("us"), [datetime.time(1, 2, 3, 4), None]),
        "wait": (pa.duration("us"), [datetime.timedelta(days=-2, microseconds=3), None]),
        "none": (pa.null(), [None, None]),
    }
    layout = layout_of(metadata={name: kind for name, (kind, _) in columns.items()})
    written = rows_of(["a", "b"])
    fixed = {name: written[name] for name in ("id", "document", "chunk", "text", "vector")}
    values = {name: pa.array(rows, kind) for name, (kind, rows) in columns.items()}
    written = pa.table({**fixed, **values}).select(layout.schema.names).cast(layout.schema)
    store = settings_of(tmp_path).open()
    store.check(layout, "docs")
    store.create("docs_1", layout)
    store.upsert("docs_1", written)
    store.close()
    store = settings_of(tmp_path).open()
    [read] = store.scan("docs_1")
    assert read.schema.equals(layout.schema)
    assert read.sort_by("id").to_pylist() == written.to_pylist()
    store.close()


def test_numbers_that_json_lacks_become_null(tmp_path):
    rows = rows_of(["a", "b"], weight=[float("nan"), float("inf")])
    store = settings_of(tmp_path).open()
    store.create("docs_1", layout_of(metadata={"weight": pa.float64()}))
    store.upsert("docs_1", rows)
    [read] = store.scan("docs_1", ["weight"])
    assert read["weight"].to_pylist() == [None, None]
    store.close()


def test_a_folder_is_of_one_process(tmp_path):
    store = settings_of(tmp_path).open()
    assert not store.has_parallel_writers
    with pytest.raises(StorageError, match="open in another process") as caught:
        settings_of(tmp_path).open()
    assert "store.to=http://host:6333" in str(caught.value)
    store.close()
    settings_of(tmp_path).open().close()


def test_a_crash_of_the_machine_loses_no_call_that_has_returned(tmp_path):
    layout = layout_of()
    (to := tmp_path / "store").mkdir()
    store = settings_of(to).open()
    store.create("docs_1", layout)
    store.upsert("docs_1", rows_of(["a", "b", "c"]))
    _lose_the_log(to, tmp_path / "first")
    store.delete("docs_1", ["b"])
    _lose_the_log(to, tmp_path / "second")
    store.close()
    for place, ids in (("first", ["a", "b", "c"]), ("second", ["a", "c"])):
        store = settings_of(tmp_path / place).open()
        rows = [row for batch in store.scan("docs_1", ["id"]) for row in batch.to_pylist()]
        assert sorted(row["id"] for row in rows) == ids
        store.close()


def _lose_the_log(folder, copy):
    """Copy a folder without what the disk need not have yet: SQLite's logs, and the lock."""
    left_out = shutil.ignore_patterns("*-wal", "*-shm", ".lock")
    shutil.copytree(folder, copy, ignore=left_out)


def test_a_collection_with_the_name_is_left_alone(tmp_path):
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(tmp_path))
    client.create_collection("docs", models.VectorParams(size=D, distance=models.Distance.DOT))
    client.create_collection("mine_1", models.VectorParams(size=D, distance=models.Distance.DOT))
    client.close()
    store = settings_of(tmp_path).open()
    assert "already has a collection docs" in refusal(store.check, layout_of(), "docs")
    store.create("docs_1", layout_of())
    assert "has a collection docs" in refusal(store.point, "docs", "docs_1")
    assert "no collection docs_9" in refusal(store.point, "other", "docs_9")
    assert "no layout" in refusal(store.create, "mine_1", layout_of())
    store.close()


def test_a_full_disk_is_said_and_the_same_call_goes_on(tmp_path):
    rows = rows_of([f"d{n}" for n in range(3_000)])
    store = settings_of(tmp_path).open()
    store.create("docs_1", layout_of())
    store.upsert("docs_1", rows.slice(0, 10))
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(StorageError):
            store.upsert("docs_1", rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, former)
    store.close()
    store = settings_of(tmp_path).open()
    store.upsert("docs_1", rows)
    store.finish("docs_1", layout_of())
    read = pa.concat_tables(store.scan("docs_1"))
    assert read.sort_by("id").equals(rows.sort_by("id"))
    store.close()


def test_the_client_alone_reads_what_was_written(tmp_path):
    """The example of docs/indexing.md, in a process that has nothing of the platform."""
    store = settings_of(tmp_path).open()
    store.create("docs_1", layout_of())
    store.upsert("docs_1", rows_of(["a", "b"]))
    store.finish("docs_1", layout_of())
    vector = next(store.scan("docs_1", ["id", "vector"])).to_pylist()
    store.point("docs", "docs_1")
    store.close()
    [query] = [row["vector"] for row in vector if row["id"] == "b"]
    code = f"""
from qdrant_client import QdrantClient
client = QdrantClient(path={str(tmp_path)!r})
points = client.query_points("docs", query={query}, limit=1).points
print(points[0].payload["id"], points[0].payload["text"])
client.close()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "b text of b\n"


def test_langchain_reads_an_index(tmp_path):
    """The example of docs/indexing.md."""
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
    from langchain_core.retrievers import BaseRetriever
    from qdrant_client import QdrantClient

    class IndexRetriever(BaseRetriever):
        embeddings: Embeddings
        client: QdrantClient
        index: str
        k: int = 5

        def _get_relevant_documents(self, query, *, run_manager):
            vector = self.embeddings.embed_query(query)
            points = self.client.query_points(self.index, query=vector, limit=self.k).points
            return [
                Document(page_content=payload.pop("text"), id=payload.pop("id"), metadata=payload)
                for payload in (point.payload for point in points)
            ]

    IndexRetriever.model_rebuild(_types_namespace=locals())
    embeddings = DeterministicFakeEmbedding(size=D)
    ids = [f"d{n}" for n in range(20)]
    vectors = np.array(embeddings.embed_documents([f"text of {n}" for n in ids]), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = rows_of(ids)
    items = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), D)
    rows = rows.set_column(rows.num_columns - 1, rows.schema.field("vector"), items)
    store = settings_of(tmp_path).open()
    store.create("docs_1", layout_of())
    store.upsert("docs_1", rows)
    store.point("docs", "docs_1")
    store.close()
    client = QdrantClient(path=str(tmp_path))
    retriever = IndexRetriever(embeddings=embeddings, client=client, index="docs", k=3)
    found = retriever.invoke("text of d7")
    assert len(found) == 3
    assert (found[0].id, found[0].page_content) == ("d7", "text of d7")
    assert found[0].metadata == {"document": "d7", "chunk": 0, "topic": "t"}
    client.close()


# A server.


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    with qdrant_server() as seen:
        yield seen


INDEX = {
    "hnsw_config": {"m": 8, "ef_construct": 50},
    "quantization_config": {"scalar": {"type": "int8", "always_ram": True}},
    "on_disk": True,
    "shard_number": 2,
}
PAYLOAD = {"topic": {"type": "keyword", "is_tenant": True}, "chunk": "integer"}


def test_a_server_gets_the_options_of_collections(server, monkeypatch):
    from rayembed_extras.indexing.stores import qdrant_tables

    monkeypatch.setattr(qdrant_tables, "POLL_SECONDS", 0.01)
    settings = settings_of(server.url, index=INDEX, payload_indexes=PAYLOAD, number_type="float16")
    store = settings.open()
    assert store.has_parallel_writers
    layout = layout_of("float16")
    store.check(layout, "docs")
    [trial] = server.written()
    assert trial.method == "DELETE"
    assert trial.path.startswith("/collections/docs_trial_")
    store.create("docs_1", layout)
    create, *indexes = server.written()[1:]
    vectors = {"size": D, "distance": "Dot", "on_disk": True, "datatype": "float16"}
    assert create.body["vectors"] == vectors
    for name in ("hnsw_config", "quantization_config", "shard_number"):
        assert create.body[name] == INDEX[name]
    assert {call.body["field_name"]: call.body["field_schema"] for call in indexes} == PAYLOAD
    server.statuses.extend(["yellow", "yellow", "green"])
    store.finish("docs_1", layout)
    assert server.statuses == []
    assert server.written()[-1].method == "PATCH"
    assert set(server.written()[-1].body) == {"hnsw_config", "quantization_config"}
    server.statuses.append("red")
    with pytest.raises(StorageError, match="optimiser"):
        store.finish("docs_1", layout)
    store.close()


def test_a_server_is_written_searched_and_switched(server):
    layout = layout_of("float16")
    store = settings_of(server.url, number_type="float16").open()
    store.create("docs_1", layout)
    rows = rows_of([f"d{n}" for n in range(1_200)])
    half = pa.array(np.asarray(rows["vector"].combine_chunks().flatten()).astype(np.float16))
    vectors = pa.FixedSizeListArray.from_arrays(half, D)
    rows = rows.set_column(rows.num_columns - 1, layout.schema.field("vector"), vectors)
    before = len(server.written())
    store.upsert("docs_1", rows)
    writes = server.written()[before:]
    assert [len(call.body["batch"]["ids"]) for call in writes] == [1_000, 200]
    assert all("wait=true" in call.path for call in writes)
    store.delete("docs_1", ["d0", "absent"])
    assert store.count("docs_1") == 1_199
    read = pa.concat_tables(store.scan("docs_1"))
    assert read.sort_by("id").to_pylist() == rows.slice(1).sort_by("id").to_pylist()
    query = np.asarray(rows["vector"].to_pylist()[5:6], np.float32)
    found = store.search("docs_1", query, 3, {"hnsw_ef": 128, "exact": False})
    assert found.ids[0][0] == "d5"
    searches = server.requests[-1].body["searches"]
    assert searches[0]["params"] == {"hnsw_ef": 128, "exact": False}
    assert "depth" in refusal(store.search, "docs_1", query, 3, {"depth": 3})
    store.point("docs", "docs_1")
    store.create("docs_2", layout)
    before = len(server.written())
    store.point("docs", "docs_2")
    [switch] = server.written()[before:]
    actions = [list(action) for action in switch.body["actions"]]
    assert actions == [["delete_alias"], ["create_alias"]]
    assert store.pointed("docs") == "docs_2"
    store.close()


@pytest.mark.parametrize("variable", ["QDRANT_API_KEY", "MY_KEY"])
def test_the_key_comes_from_the_environment_and_stands_nowhere(
    server, variable, monkeypatch, caplog
):
    caplog.set_level("DEBUG")
    server.key = KEY
    settings = settings_of(server.url, key_from=variable)
    wrong = "not-" + KEY
    monkeypatch.setenv(variable, wrong)
    store = settings.open()
    message = refusal(store.tables, "docs")
    store.close()
    assert f"environment variable {variable}" in message
    assert "Invalid API key …" in message
    assert KEY not in message
    monkeypatch.setenv(variable, KEY)
    store = settings.open()
    assert store.tables("docs") == []
    assert server.requests[-1].key == KEY
    refused = refusal(store.count, "absent_1")
    written = [settings.model_dump_json(), repr(settings), repr(store), refused, caplog.text]
    assert not any(KEY in text for text in written)
    store.close()


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        ((403, "Forbidden"), ConfigError, "API key that may write"),
        ((400, "Wrong input"), ConfigError, "Wrong input"),
        ((500, "No space left on device"), StorageFullError, "free space"),
        ((503, "starting"), StorageError, "run it again"),
        ((429, "too many"), StorageError, "run it again"),
    ],
)
def test_answers_of_a_server_that_refuses(server, failure, error, words):
    store = settings_of(server.url).open()
    server.failure = failure
    with pytest.raises(error, match=words) as caught:
        store.check(layout_of(), "docs")
    assert type(caught.value) is error
    store.close()


def test_a_server_that_is_old_or_not_there(server):
    server.version = "1.15.4"
    store = settings_of(server.url).open()
    assert "1.15.4; 1.16 or later" in refusal(store.check, layout_of(), "docs")
    store.close()
    store = settings_of("http://127.0.0.1:1").open()
    with pytest.raises(StorageError, match="check that Qdrant runs there"):
        store.check(layout_of(), "docs")
    store.close()

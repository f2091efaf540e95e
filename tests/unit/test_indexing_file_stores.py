"""What the contract of vector stores leaves to the stores `lance` and `faiss`: kills between any
two writes, object storage, and what other programs read.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pytest
from index_engines import (
    by_id,
    check_search,
    drawn_rows,
    layout_of,
    scanned,
    settings_of,
    unit_vectors,
)
from made_up_index import documents, settings, write
from s3_server import BUCKET, s3_server
from tiny_folders import save_biencoder

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError, StorageFullError
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.settings import STORES
from rayembed_extras.indexing.stores import faiss_tables


class Killed(BaseException):
    """Stands for a kill: no handler of errors catches it."""


WRITES = ("write_atomic", "write_json", "remove_file")


def _dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Let the write number `at` of the store raise before it writes; returns the counter."""
    done = [0]

    def dies(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            done[0] += 1
            if done[0] == at:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in WRITES:
        monkeypatch.setattr(faiss_tables, name, dies(getattr(faiss_tables, name)))
    tables = faiss_tables.FaissTables
    monkeypatch.setattr(tables, "_write_index", dies(tables._write_index))
    return lambda: done[0]


def test_a_kill_before_any_write_of_a_faiss_file_is_made_good_by_the_same_calls(
    tmp_path: Path,
) -> None:
    layout = layout_of("float32")
    rng = np.random.default_rng(0)
    first = drawn_rows(rng, [f"d{n}" for n in range(60)], layout)
    second = drawn_rows(rng, [f"d{n}" for n in range(40, 90)], layout)
    gone = [f"d{n}" for n in range(10, 50)]
    before = by_id(first)
    after = {name: row for name, row in {**before, **by_id(second)}.items() if name not in gone}
    at, finished = 0, False
    while not finished:
        at += 1
        place = tmp_path / str(at)
        settings = settings_of("faiss", "float32", place)
        with closing(settings.open()) as store:
            store.create("docs_1", layout)
            store.upsert("docs_1", first)
            store.finish("docs_1", layout)

        def update(settings: Any = settings) -> None:
            with closing(settings.open()) as store:
                store.upsert("docs_1", second)
                store.delete("docs_1", gone)
                store.finish("docs_1", layout)

        with pytest.MonkeyPatch.context() as monkeypatch:
            count = _dying(monkeypatch, at)
            try:
                update()
            except Killed:
                pass
            else:
                finished = count() < at
        if not finished:
            with closing(settings.open()) as store:
                searched = {name for ids in _all(store, layout) for name in ids if name}
                assert searched in (set(before), set(after))  # all of a state, or of the next
        update()
        with closing(settings.open()) as store:
            assert scanned(store, "docs_1", layout) == after
            check_search(store, "docs_1", after, layout, at)
            files = {file.name for file in Path(store._path("docs_1", "")).iterdir()}
        assert sum(name.endswith(".index") for name in files) == 1
        assert not any(name.endswith((".part", ".deleted")) for name in files)
    assert at > 8


def _all(store: Any, layout: Any) -> list[list[str]]:
    queries = unit_vectors(np.random.default_rng(1), 1, layout.dimensions)
    return store.search("docs_1", queries, 1000).ids  # type: ignore[no-any-return]


def test_a_full_disk_is_told_by_faiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of("float32")
    with closing(settings_of("faiss", "float32", tmp_path).open()) as store:
        store.create("docs_1", layout)
        store.upsert("docs_1", drawn_rows(np.random.default_rng(0), ["a"], layout))
        import faiss

        def full(*_: Any) -> None:
            raise RuntimeError(
                "Error in ...: Error: 'ret == (size)' failed: No space left on device"
            )

        monkeypatch.setattr(faiss, "write_index", full)
        with pytest.raises(StorageFullError, match="no room"):
            store.finish("docs_1", layout)
        monkeypatch.undo()
        store.finish("docs_1", layout)
        assert store.count("docs_1") == 1


@pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("named", ["by the environment", "by the address"])
@pytest.mark.parametrize("kind", ["lance", "faiss"])
def test_tables_in_object_storage(kind: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of("float32")
    rng = np.random.default_rng(0)
    rows = drawn_rows(rng, [f"d{n}" for n in range(60)], layout)
    with s3_server() as environment:
        address = f"s3://{BUCKET}/indexes/docs"
        if named == "by the address":
            address += f"?region=us-east-1&endpoint_override={environment.pop('AWS_ENDPOINT_URL')}"
            monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = parse(STORES.classes()[kind], {"kind": kind, "to": address})
        with closing(settings.open()) as store:
            store.check(layout, "docs")
            for table in ("docs_1", "docs_2"):
                store.create(table, layout)
                store.upsert(table, rows)
                store.upsert(table, rows)
                store.delete(table, ["d3"])
                store.finish(table, layout)
            store.point("docs", "docs_2")
        with closing(settings.open()) as store:
            reference = {name: row for name, row in by_id(rows).items() if name != "d3"}
            assert store.pointed("docs") == "docs_2"
            assert scanned(store, "docs_2", layout) == reference
            check_search(store, "docs_2", reference, layout, 0)
            store.drop("docs_1")
            assert store.tables("docs") == ["docs_2"]


def test_lancedb_opens_an_index_by_its_name(tmp_path: Path) -> None:
    layout = layout_of("float32")
    rng = np.random.default_rng(0)
    settings = settings_of("lance", "float32", tmp_path)
    with closing(settings.open()) as store:
        for table, count in (("docs_1", 20), ("docs_2", 30)):
            store.create(table, layout)
            store.upsert(table, drawn_rows(rng, [f"d{n}" for n in range(count)], layout))
            store.finish(table, layout)
            store.point("docs", table)
            connection = lancedb.connect(settings.to)
            opened = connection.open_table("docs")
            assert opened.count_rows() == count
            query = unit_vectors(rng, 1)[0]
            theirs = [row["id"] for row in opened.search(query).limit(5).to_list()]
            assert store.search(table, query[None], 5).ids == [theirs]  # L2, of unit vectors
        with pytest.raises(ConfigError, match="docs_9"):
            store.point("docs", "docs_9")
        connection.create_table("theirs", data=[{"vector": [1.0, 2.0], "id": "x"}])
        with pytest.raises(ConfigError, match="another program"):
            store.check(layout, "theirs")
        connection.create_table("their_1", data=[{"vector": [1.0, 2.0], "id": "x"}])
        with pytest.raises(ArtifactError, match="another program"):
            store.upsert("their_1", layout.schema.empty_table())


def test_lance_keeps_versions_that_readers_of_the_current_table_hold(tmp_path: Path) -> None:
    layout = layout_of("float32")
    rng = np.random.default_rng(0)
    settings = settings_of("lance", "float32", tmp_path)
    ids = [f"d{n}" for n in range(20)]
    with closing(settings.open()) as store:
        store.create("docs_1", layout)
        for _ in range(3):
            store.upsert("docs_1", drawn_rows(rng, ids, layout))
        store.finish("docs_1", layout)
        data = tmp_path / "tables" / "docs_1.lance" / "data"
        assert len(list(data.iterdir())) == 1  # nobody reads it yet
        store.point("docs", "docs_1")
        reader = lancedb.connect(settings.to).open_table("docs_1")
        former = reader.to_arrow()
        store.upsert("docs_1", drawn_rows(rng, ids, layout))
        store.finish("docs_1", layout)
        assert reader.to_arrow().equals(former)


@pytest.mark.parametrize(
    ("kind", "number_type", "index", "message"),
    [
        ("lance", "bits", {"index_type": "IVF_PQ"}, "IVF_FLAT"),
        ("lance", "float32", {"num_partitions": 3}, "index_type"),
        ("lance", "float32", {"index_type": "IVF_FLAT", "metric": "l2"}, "metric"),
        ("faiss", "float32", {"factory": "IVF3,Nonsense"}, "Nonsense"),
        ("faiss", "bits", {"factory": "Flat"}, "bits"),
        ("faiss", "float32", {"nlist": 3}, "nlist"),
        ("faiss", "float32", {"factory": "PQ7"}, "PQ7"),
    ],
)
def test_wrong_index_settings_are_refused_before_work(
    kind: str, number_type: str, index: dict[str, Any], message: str, tmp_path: Path
) -> None:
    store = settings_of(kind, number_type, tmp_path, index).open()
    with pytest.raises(ConfigError, match=message):
        store.check(layout_of(number_type), "docs")
    assert not list(tmp_path.iterdir())


def test_settings_that_fail_on_the_rows_are_told(tmp_path: Path) -> None:
    layout = layout_of("float32")
    rows = drawn_rows(np.random.default_rng(0), [f"d{n}" for n in range(20)], layout)
    for kind, index, message in (
        ("faiss", {"factory": "IVF64,Flat"}, "20 rows"),
        ("lance", {"index_type": "IVF_PQ", "num_sub_vectors": 7}, "IVF_PQ"),
        ("lance", {"index_type": "NONE_SUCH"}, "NONE_SUCH"),
    ):
        with closing(settings_of(kind, "float32", tmp_path / kind, index).open()) as store:
            store.create("docs_1", layout)
            store.upsert("docs_1", rows)
            with pytest.raises(ConfigError, match=message):
                store.finish("docs_1", layout)
        with closing(settings_of(kind, "float32", tmp_path / kind, {}).open()) as store:
            store.finish("docs_1", layout)
            assert scanned(store, "docs_1", layout) == by_id(rows)
            query = unit_vectors(np.random.default_rng(0), 1)
            with pytest.raises(ConfigError, match="probings"):
                store.search("docs_1", query, 3, {"probings": 9})


def test_an_update_keeps_the_index_of_the_store(tmp_path: Path) -> None:
    save_biencoder(tmp_path / "model")
    path = write(tmp_path / "docs.jsonl", documents(20))
    store = {"kind": "faiss", "index": {"factory": "HNSW16"}}
    run = settings(tmp_path / "out", tmp_path / "model", path, store=store)
    made = build_index(run)
    assert made.manifest.store["index"] == {"factory": "HNSW16"}
    plain = run.model_copy(update={"store": run.store.model_copy(update={"index": {}})})
    again = build_index(plain, update=True)
    assert again.manifest.store["index"] == again.store.index == {"factory": "HNSW16"}

"""The contract of vector stores (`rayembed_extras/indexing/store.py`), over every member of
`STORES` and every number type that it keeps.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from index_engines import (
    CASES,
    ENGINES,
    IDS,
    METADATA,
    WIDE,
    D,
    by_id,
    check_search,
    drawn_rows,
    layout_of,
    scanned,
    settings_of,
    unit_vectors,
    values_of,
)

from rayembed.errors import ConfigError
from rayembed.machine.quantisation import from_bits, to_bits
from rayembed_extras.indexing.settings import STORES, StoreSettings
from rayembed_extras.indexing.store import Layout

SEEDS = tuple(int(seed) for seed in os.environ.get("INDEXING_SEEDS", "0,1").split(","))
KINDS = sorted(STORES.classes())
each_case = pytest.mark.parametrize(("kind", "number_type"), CASES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def _type_of(kind: str) -> str:
    cls = STORES.classes()[kind]
    assert issubclass(cls, StoreSettings)
    return cls.number_types[0]


def test_every_kind_has_an_engine() -> None:
    assert set(KINDS) == set(ENGINES)


@each_case
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_calls_leave_the_rows_of_a_dictionary(
    kind: str, number_type: str, seed: int, tmp_path: Path
) -> None:
    print(f"seed {seed}")  # noqa: T201
    rng = np.random.default_rng([seed, len(number_type)])
    settings = settings_of(kind, number_type, tmp_path)
    dimensions = D if seed % 2 else WIDE
    layout = layout_of(number_type, has_text=seed % 2 == 0, dimensions=dimensions)
    known = [*IDS, *(f"doc{n}#{n % 3}" for n in range(120))]
    reference: dict[str, dict[str, Any]] = {}
    store = settings.open()
    store.check(layout, "drawn")
    store.create("drawn_1", layout)
    last: pa.Table | None = None
    for step in range(14):
        action = rng.choice(["upsert", "upsert", "upsert", "delete", "repeat", "reopen", "finish"])
        if action == "upsert":
            ids = [known[n] for n in rng.permutation(len(known))[: rng.integers(0, 60)]]
            last = drawn_rows(rng, ids, layout)
            store.upsert("drawn_1", last)
            reference |= by_id(last)
        elif action == "repeat" and last is not None:
            store.upsert("drawn_1", last)
            reference |= by_id(last)
        elif action == "delete":
            gone = [known[n] for n in rng.permutation(len(known))[: rng.integers(0, 50)]]
            for _ in range(1 + step % 2):  # the second time nothing is there
                store.delete("drawn_1", [*gone, "not there", "nor' this"])
            reference = {name: row for name, row in reference.items() if name not in gone}
        elif action == "reopen":
            store.close()
            store = settings.open()
            store.create("drawn_1", layout)  # does nothing
        else:
            store.finish("drawn_1", layout)
            assert store.count("drawn_1") == len(reference)
            check_search(store, "drawn_1", reference, layout, seed)
    for _ in range(2):
        store.finish("drawn_1", layout)
        assert store.count("drawn_1") == len(reference)
        assert scanned(store, "drawn_1", layout) == reference
        check_search(store, "drawn_1", reference, layout, seed)
    store.close()
    with closing(settings.open()) as store:
        assert scanned(store, "drawn_1", layout) == reference
        check_search(store, "drawn_1", reference, layout, seed, k=200)


@pytest.fixture
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A store with a finished table `docs_1` of 50 rows: store, settings, layout, rows by id."""
    kind, number_type = request.param
    settings = settings_of(kind, number_type, tmp_path)
    layout = layout_of(number_type)
    rows = drawn_rows(np.random.default_rng(5), [f"d{n}" for n in range(50)], layout)
    store = settings.open()
    store.create("docs_1", layout)
    store.upsert("docs_1", rows)
    store.finish("docs_1", layout)
    yield store, settings, layout, by_id(rows)
    store.close()


first_type = pytest.mark.parametrize(
    "filled", [(kind, _type_of(kind)) for kind in KINDS], ids=KINDS, indirect=True
)


@first_type
def test_a_name_points_at_one_table_which_is_not_dropped(filled: Any) -> None:
    store, settings, layout, rows = filled
    assert store.tables("docs") == ["docs_1"]
    assert store.tables("doc") == []
    assert store.pointed("docs") is None
    store.point("docs", "docs_1")
    assert store.pointed("docs") == "docs_1"
    store.create("docs_2", layout)
    store.create("docs_10", layout)
    store.create("docs_old_1", layout)  # of another index
    assert store.tables("docs") == ["docs_1", "docs_2", "docs_10"]
    assert store.count("docs_2") == 0
    check_search(store, "docs_2", {}, layout, 0)
    store.finish("docs_2", layout)  # an empty table
    check_search(store, "docs_2", {}, layout, 0)
    with pytest.raises(ConfigError, match="docs_1"):
        store.drop("docs_1")
    assert scanned(store, "docs_1", layout) == rows
    store.point("docs", "docs_2")
    store.point("docs", "docs_2")
    with reopened(store, settings) as store:
        assert store.pointed("docs") == "docs_2"
        store.drop("docs_1")
        store.drop("docs_1")
        assert store.tables("docs") == ["docs_2", "docs_10"]
        assert store.pointed("docs_old") is None
        store.drop("docs_old_1")
        assert store.tables("docs_old") == []


@contextmanager
def reopened(store: Any, settings: Any) -> Iterator[Any]:
    """Close a store and open another connection for a block."""
    store.close()
    with closing(settings.open()) as again:
        yield again


@first_type
def test_wrong_rows_and_queries_are_refused_and_change_nothing(filled: Any) -> None:
    store, _, layout, rows = filled
    rng = np.random.default_rng(1)
    wide = layout_of(layout.number_type, dimensions=layout.dimensions * 2)
    with pytest.raises(ConfigError, match=r"48|24|dimension"):
        store.upsert("docs_1", drawn_rows(rng, ["new"], wide))
    with pytest.raises(ConfigError):
        store.upsert("docs_1", drawn_rows(rng, ["new"], layout).drop_columns(["topic"]))
    with pytest.raises(ConfigError, match=r"48|24|dimension"):
        store.search("docs_1", unit_vectors(rng, 2, 2 * layout.dimensions), 3)
    with pytest.raises(ConfigError, match="docs_1"):
        store.create("docs_1", wide)
    other = Layout(layout.dimensions, layout.number_type, {"topic": pa.string()}, True)
    with pytest.raises(ConfigError, match="docs_1"):
        store.create("docs_1", other)
    assert scanned(store, "docs_1", layout) == rows


@first_type
def test_columns_are_read_alone(filled: Any) -> None:
    store, _, layout, rows = filled
    for columns in (["id"], ["id", "vector"], ["views", "id"]):
        batches = list(store.scan("docs_1", columns))
        assert {tuple(batch.schema.names) for batch in batches} == {tuple(columns)}
        read = [row for batch in batches for row in batch.to_pylist()]
        assert {row["id"]: row for row in read} == {
            name: {column: row[column] for column in columns} for name, row in rows.items()
        }
    assert store.search("docs_1", np.empty((0, layout.dimensions), np.float32), 3).ids == []


@each_case
def test_the_stores_own_index_finds_most_and_is_kept_up_to_date(
    kind: str, number_type: str, tmp_path: Path
) -> None:
    tried = 0
    for number, index in enumerate(ENGINES[kind].approximate if kind in ENGINES else ({},)):
        place = tmp_path / str(number)
        place.mkdir()
        settings = settings_of(kind, number_type, place, index)
        layout = layout_of(number_type)
        rng = np.random.default_rng(3)
        rows = drawn_rows(rng, [f"d{n}" for n in range(600)], layout)
        with closing(settings.open()) as store:
            try:
                store.check(layout, "docs")
            except ConfigError as error:  # not for this number type, and says so
                assert number_type in str(error)  # noqa: PT017
                continue
            tried += 1
            store.create("docs_1", layout)
            store.upsert("docs_1", rows)
            store.finish("docs_1", layout)
            queries = unit_vectors(rng, 40)
            with_index = store.search("docs_1", queries, 10)
            reference = by_id(rows)
            _recall_at_least(0.2, with_index.ids, queries, reference, layout)
            changed = drawn_rows(rng, [f"d{n}" for n in range(300, 900)], layout)
            store.upsert("docs_1", changed)
            store.delete("docs_1", [f"d{n}" for n in range(100)])
            store.finish("docs_1", layout)
            reference = {**reference, **by_id(changed)}
            reference = {name: row for name, row in reference.items() if int(name[1:]) >= 100}
            assert store.count("docs_1") == 800
            later = store.search("docs_1", queries, 10)
            assert {name for ids in later.ids for name in ids if name} <= set(reference)
            _recall_at_least(0.2, later.ids, queries, reference, layout)
    if not tried:
        pytest.skip(f"{kind} with {number_type} has no approximate index to try")


def _recall_at_least(
    least: float, ids: Any, queries: np.ndarray, rows: Any, layout: Layout
) -> None:
    if layout.number_type == "bits":
        queries = from_bits(to_bits(queries), layout.dimensions)
    exact = np.argsort(-(queries @ values_of(rows, layout).T), axis=1)[:, :10]
    names = list(rows)
    shares = [
        len({names[n] for n in best} & set(of_query)) / 10
        for best, of_query in zip(exact, ids, strict=True)
    ]
    assert np.mean(shares) >= least


def _process(tmp_path: Path, **task: Any) -> subprocess.Popen[str]:
    file = tmp_path / f"task{time.monotonic_ns()}.json"
    file.write_text(json.dumps(task))
    support = Path(__file__).parents[1] / "support"
    return subprocess.Popen(
        [sys.executable, str(support / "index_store_writer.py"), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(support), *sys.path])},
    )


def _lines_of(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return output.splitlines()


@each_kind
@pytest.mark.parametrize("kill_at", ["upsert", "finish"])
def test_a_killed_writer_leaves_whole_calls(kind: str, kill_at: str, tmp_path: Path) -> None:
    number_type = _type_of(kind)
    settings = settings_of(kind, number_type, tmp_path)
    layout = layout_of(number_type)
    with closing(settings.open()) as store:
        store.create("docs_1", layout)
    calls = [
        (seed, [f"{seed}-{n}" for n in range(400)] + [f"all{n}" for n in range(50)])
        for seed in range(12 if kill_at == "upsert" else 3)
    ]
    process = _process(
        tmp_path,
        settings=settings.model_dump(mode="json"),
        table="docs_1",
        number_type=number_type,
        calls=calls,
        finish=True,
    )
    assert process.stdout is not None
    written = 0
    for line in process.stdout:
        written += line.startswith("written")
        if written == 3:
            break
    time.sleep(0.004)
    process.kill()
    process.communicate()
    with closing(settings.open()) as store:
        store.finish("docs_1", layout)
        # Calls are whole: those that ended, and at most one of the one that was cut off.
        references = []
        reference: dict[str, Any] = {}
        for seed, ids in calls:
            reference = reference | by_id(drawn_rows(np.random.default_rng(seed), ids, layout))
            references.append(reference)
        if kill_at == "finish" or ENGINES[kind].once_after_kill:
            present = scanned(store, "docs_1", layout)
            assert present in references[2:] or not ENGINES[kind].whole_calls
            check_search(store, "docs_1", present, layout, 0)
        # The same command goes on.
        for seed, ids in calls:
            store.upsert("docs_1", drawn_rows(np.random.default_rng(seed), ids, layout))
        store.finish("docs_1", layout)
        assert scanned(store, "docs_1", layout) == references[-1]


@each_kind
def test_a_full_disk_leaves_the_former_rows(kind: str, tmp_path: Path) -> None:
    number_type = _type_of(kind)
    settings = settings_of(kind, number_type, tmp_path)
    if not ENGINES[kind].has_files:
        pytest.skip(f"the server of {kind} writes the files, not this process")
    layout = layout_of(number_type)
    rows = drawn_rows(np.random.default_rng(5), [f"d{n}" for n in range(50)], layout)
    with closing(settings.open()) as store:
        store.create("docs_1", layout)
        store.upsert("docs_1", rows)
        store.finish("docs_1", layout)
    lines = _lines_of(
        _process(
            tmp_path,
            settings=settings.model_dump(mode="json"),
            table="docs_1",
            number_type=number_type,
            calls=[(9, [f"d{n}" for n in range(20_000)])],
            limit=300_000,
            finish=True,
        )
    )
    assert lines[0] == "ready"
    assert lines[1].startswith("refused")
    with closing(settings.open()) as store:
        assert scanned(store, "docs_1", layout) == by_id(rows)
        check_search(store, "docs_1", by_id(rows), layout, 0)
        again = drawn_rows(np.random.default_rng(9), [f"d{n}" for n in range(2_000)], layout)
        store.upsert("docs_1", again)
        store.finish("docs_1", layout)
        assert scanned(store, "docs_1", layout) == by_id(again)


@each_kind
def test_writers_that_may_write_at_once_lose_nothing(kind: str, tmp_path: Path) -> None:
    number_type = _type_of(kind)
    settings = settings_of(kind, number_type, tmp_path)
    layout = layout_of(number_type)
    with closing(settings.open()) as store:
        store.create("docs_1", layout)
        if not store.has_parallel_writers:
            pytest.skip(f"{kind} is written by one process")
    # Three processes with rows of their own, and rows that a repeated task writes twice.
    shared = [f"same{n}" for n in range(100)]
    same = [(7, shared)] * 3 if ENGINES[kind].same_rows_at_once else []
    calls = [
        [(100 * w + n, [f"{w}-{n}-{i}" for i in range(100)]) for n in range(4)] + same
        for w in range(3)
    ]
    processes = [
        _process(
            tmp_path,
            settings=settings.model_dump(mode="json"),
            table="docs_1",
            number_type=number_type,
            calls=of_writer,
        )
        for of_writer in calls
    ]
    for process in processes:
        assert len(_lines_of(process)) == 5 + len(same)
    with closing(settings.open()) as store:
        store.finish("docs_1", layout)
        reference: dict[str, Any] = {}
        for seed, ids in [call for of_writer in calls for call in of_writer]:
            reference |= by_id(drawn_rows(np.random.default_rng(seed), ids, layout))
        assert scanned(store, "docs_1", layout) == reference


@each_kind
def test_number_types_that_a_store_does_not_keep_are_refused(kind: str, tmp_path: Path) -> None:
    cls = STORES.classes()[kind]
    assert issubclass(cls, StoreSettings)
    assert set(METADATA)  # the types of the tests' metadata
    for number_type in {"float32", "float16", "int8", "bits"} - set(cls.number_types):
        with pytest.raises(ConfigError, match=number_type):
            settings_of(kind, number_type, tmp_path)

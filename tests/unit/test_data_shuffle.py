"""Rows scattered by a key and gathered bucket by bucket."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.data.engine import shuffle
from rayembed.data.engine.exchange import Buckets, Sent, exchange, forward
from rayembed.data.engine.shuffle import Route, Scatter, bucket_of, number_of_buckets
from rayembed.data.engine.work_items import in_process
from rayembed.errors import ArtifactError, StorageError

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


def arrived(folder: Path | str, files: list[str], buckets: int) -> Buckets:
    found = Buckets(str(folder), len(files), Route.to(buckets), tuple(files))
    forward(found, "test", in_process)
    return found


@settings(deadline=None, max_examples=40)
@given(
    keys=st.lists(st.text("abc", max_size=3), max_size=60),
    buckets=st.integers(1, 9),
    fan_out=st.sampled_from([2, 3, 128]),
)
def test_each_row_is_in_its_bucket_once_and_in_order(
    keys: list[str], buckets: int, fan_out: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("scattered"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "FAN_OUT", fan_out)  # up to four levels
        _check_buckets(folder, keys, buckets)


def _check_buckets(folder: str, keys: list[str], buckets: int) -> None:
    tasks = [Scatter(folder, SCHEMA, buckets) for _ in range(3)]
    for number, key in enumerate(keys):
        tasks[number % 3].add(bucket_of(key, buckets), {"key": key, "value": number})
    files = [name for task in tasks for name in task.finish()]
    there = arrived(folder, files, buckets)
    gathered = [there.records(bucket) for bucket in range(buckets)]
    assert sorted(row["value"] for rows in gathered for row in rows) == list(range(len(keys)))
    for bucket, rows in enumerate(gathered):
        assert all(bucket_of(row["key"], buckets) == bucket for row in rows)
        for task in range(3):
            own = [row["value"] for row in rows if row["value"] % 3 == task]
            assert own == sorted(own)


def test_many_rows_are_several_files_and_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scattered(folder: Path) -> tuple[list[str], list[dict[str, object]]]:
        scatter = Scatter(str(folder), SCHEMA, 4)
        for number in range(1000):
            scatter.add(number % 4, {"key": "x" * 50, "value": number})
        files = scatter.finish()
        return files, arrived(folder, files, 4).records(1)

    one, rows = scattered(tmp_path / "one")
    monkeypatch.setattr(shuffle, "_BYTES_WAITING", 20_000)
    many, again = scattered(tmp_path / "many")
    assert len(one) == 1
    assert len(many) > 10
    assert again == rows
    assert [row["value"] for row in rows] == list(range(1, 1000, 4))


def test_a_broken_file_and_the_number_of_buckets(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"short")
    for name in ("x.arrow", "gone.arrow"):
        with pytest.raises(ArtifactError, match=r"cannot read the file of shuffled rows.*Remove"):
            arrived(tmp_path, [name], 1).read(0)
    assert [number_of_buckets(size, 10) for size in (0, 1, 10, 11, 10**9)] == [1, 1, 1, 2, 10**8]


def test_a_storage_that_fails_is_no_reason_to_remove_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(pyarrow.fs.LocalFileSystem):
        def open_input_file(self, path: str) -> None:
            raise OSError("AWS Error INTERNAL_FAILURE during GetObject operation")

    monkeypatch.setattr(shuffle, "open_storage", lambda path: (Failing(), path))
    with pytest.raises(StorageError, match="INTERNAL_FAILURE") as told:
        arrived(tmp_path, ["x.arrow"], 1).read(0)
    assert "Remove" not in str(told.value)


@dataclass(frozen=True)
class Numbers:
    """Work item: rows with these numbers, which are their buckets."""

    numbers: tuple[int, ...]

    @property
    def key(self) -> str:
        return str(hash(self.numbers))


def send(item: Numbers) -> Sent:
    table = pa.table({"value": pa.array(item.numbers, pa.int64())})
    return Sent(table, np.array(item.numbers), {"rows": len(item.numbers)})


def test_files_and_ranges_grow_with_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tasks as buckets, each with rows of every kind: the counts that decide the cost."""
    monkeypatch.setattr(shuffle, "FAN_OUT", 4)
    read: list[str] = []
    whole = shuffle._read_segment
    monkeypatch.setattr(
        shuffle, "_read_segment", lambda path, at: read.append(path) or whole(path, at)
    )
    found = {}
    for tasks in (16, 64):
        rng = np.random.default_rng(0)
        numbers = rng.permutation(np.arange(8 * tasks) % tasks).reshape(tasks, 8)
        items = [Numbers(tuple(row)) for row in numbers.tolist()]
        folder = tmp_path / str(tasks)
        read.clear()
        buckets, results = exchange(str(folder), "test", send, items, tasks, in_process)
        for bucket in range(tasks):
            rows = pa.concat_tables(buckets.read(bucket))["value"].to_pylist()
            assert rows == [bucket] * 8
        assert [result["rows"] for result in results] == [8] * tasks
        found[tasks] = len(list(folder.rglob("*.arrow"))), len(read)
        # Nothing is done again.
        exchange(str(folder), "test", None, items, tasks, in_process)
    # Two levels and three, of as many files as tasks, of which each is read by four.
    assert found == {16: (2 * 16, 2 * 16 * 4), 64: (3 * 64, 3 * 64 * 4)}
    assert found[64][1] < 64 * 64, "the control: a range of each file for each bucket"


def test_one_bucket_of_many_files_and_many_of_one() -> None:
    assert Route.to(1) == Route(1, 1, 1)
    assert Route.to(shuffle.FAN_OUT) == Route(128, 1, 128)
    assert Route.to(10**9 // 8192) == Route(122070, 3, 50)

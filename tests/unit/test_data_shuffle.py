"""Rows scattered by a key and gathered bucket by bucket."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.data import shuffle
from rayembed.data.shuffle import Scatter, bucket_of, gather, number_of_buckets
from rayembed.errors import ArtifactError

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


@settings(deadline=None, max_examples=40)
@given(keys=st.lists(st.text("abc", max_size=3), max_size=60), buckets=st.integers(1, 9))
def test_each_row_is_in_its_bucket_once_and_in_order(
    keys: list[str], buckets: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("scattered"))
    tasks = [Scatter(folder, SCHEMA, buckets) for _ in range(3)]
    for number, key in enumerate(keys):
        tasks[number % 3].add(bucket_of(key, buckets), {"key": key, "value": number})
    files = [name for task in tasks for name in task.finish()]
    gathered = [gather(folder, files, bucket) for bucket in range(buckets)]
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
        return files, gather(str(folder), files, 1)

    one, rows = scattered(tmp_path / "one")
    monkeypatch.setattr(shuffle, "_BYTES_WAITING", 20_000)
    many, again = scattered(tmp_path / "many")
    assert len(one) == 1
    assert len(many) > 10
    assert again == rows
    assert [row["value"] for row in rows] == list(range(1, 1000, 4))


def test_a_broken_file_and_the_number_of_buckets(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"short")
    with pytest.raises(ArtifactError, match="cannot read the scattered rows"):
        gather(str(tmp_path), ["x.arrow"], 0)
    with pytest.raises(ArtifactError, match="cannot read the scattered rows"):
        gather(str(tmp_path), ["gone.arrow"], 0)
    assert [number_of_buckets(size, 10) for size in (0, 1, 10, 11, 10**9)] == [1, 1, 1, 2, 4096]

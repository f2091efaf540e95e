"""Heads of files: small ones are read whole, of large ones rows are estimated or counted."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.sources.check import is_here, look

ROW = {"query": "what is it " * 8, "positive": "it is a text of some length " * 12}


def dataset(path, **more):
    return parse(
        DatasetConfig, {"name": "d", "source": {"kind": "pairs", "path": str(path), **more}}
    )


def rows(number):
    return [{"query": f"{i} {ROW['query']}", "positive": ROW["positive"]} for i in range(number)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    table = pa.Table.from_pylist(rows(21_000))
    pq.write_table(table, folder / "a.parquet", row_group_size=3000, compression="none")
    lines = [json.dumps(row) for row in rows(21_000)]
    lines[5] = "{no json"
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def test_a_small_file_is_read_whole(tmp_path):
    given = [*rows(40), *rows(3), {"query": "", "positive": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    head = look(dataset("a.jsonl"), str(tmp_path))
    assert (head.rows, head.exact, head.whole, head.read) == (44, True, True, 44)
    assert (head.records, head.most_records, head.rejected) == (40, 40, {"no query": 1})
    assert head.bad == 1
    assert head.columns == ("query", "positive")
    assert head.example.startswith('{"query": "0 what is it')


def test_rows_of_a_large_file_are_estimated_and_those_of_parquet_counted(large):
    head = look(dataset(large / "a.jsonl"), "")
    assert head.rows == pytest.approx(21_000, rel=0.02)
    assert (head.exact, head.whole, head.read, head.most_records) == (False, False, 1000, None)
    assert head.rejected == {"not JSON": 1}
    head = look(dataset(large / "a.parquet"), "")
    assert (head.rows, head.exact, head.whole) == (21_000, True, False)


def test_no_file_is_hashed(large, monkeypatch):
    def read(*_):
        raise AssertionError("the whole file is read")

    monkeypatch.setattr("rayembed.data.sources.versions.content_version", read)
    assert look(dataset(large / "a.jsonl"), "").rows
    with pytest.raises(AssertionError, match="whole file"):
        dataset(large / "a.jsonl").source.find()


def test_instructions_of_rows_are_read(tmp_path):
    given = [{**row, "task": f"task {i % 3}"} for i, row in enumerate(rows(9))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    head = look(dataset(tmp_path / "a.jsonl", instruction="task"), "")
    assert head.instructions == ("task 0", "task 1", "task 2")


def test_what_lies_elsewhere_is_not_here(tmp_path):
    assert is_here(dataset("a.jsonl"), str(tmp_path))
    assert not is_here(dataset("a.jsonl"), "s3://bucket/data")
    assert not is_here(dataset("hf://datasets/a/b@main"), "")

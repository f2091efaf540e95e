"""A file that changes between the look and the conversion is told, and nothing is made of it."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.cleaning.evaluation_texts import find_sources, read_texts
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.sources import files
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import read_rows
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import DataError

ROWS = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(30)]
OTHERS = [{"query": f"r {i}", "positive": f"p {i}"} for i in range(30)]


def content(name: str, rows: list[dict[str, str]]) -> bytes:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), sink, compression="none")
        return bytes(sink.getvalue())
    if name.endswith(".csv"):
        return b"query,positive\n" + b"".join(
            f"{r['query']},{r['positive']}\n".encode() for r in rows
        )
    return gzip.compress(lines, mtime=0) if name.endswith(".gz") else lines


def rewrite(path: Path, data: bytes) -> None:
    """Write other content in place, with the time of the former one."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
@pytest.mark.parametrize("change", ["grown", "same size and time", "gone"])
def test_what_was_written_after_the_look_comes_under_no_name(name, change, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 200)
    path = tmp_path / name
    path.write_bytes(content(name, ROWS))
    source = {"kind": "pairs", "path": str(path)}
    dataset = parse(DatasetConfig, {"name": "own", "source": source})
    context = PipelineContext(str(tmp_path / "out"), 0)
    looked_at = check_source(dataset, "")
    if change == "gone":
        path.unlink()
    elif change == "grown":
        path.write_bytes(content(name, [*ROWS, *OTHERS]))
    else:
        other = content(name, OTHERS)
        rewrite(path, other)
    with pytest.raises(Exception, match=r"changed after this job listed it|cannot read the rows"):
        make_records(context, looked_at, HeldOut())
    assert not list(tmp_path.glob("out/data/records/*/manifest.json"))
    # With the file as it was, all is made of that, and of nothing that was read meanwhile.
    path.write_bytes(content(name, ROWS))
    made = make_records(context, check_source(dataset, ""), HeldOut())
    assert made.manifest["rows_in"] == len(ROWS)
    assert make_records(context, looked_at, HeldOut()).folder == made.folder


def test_a_touched_or_copied_file_is_the_same(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content("a.jsonl", ROWS))
    (piece,) = list_pieces(str(path))
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)  # another inode and other times
    assert len(list(read_rows(piece))) == len(ROWS)


def test_texts_of_a_folder_that_change_are_told(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (piece,) = list_pieces(str(tmp_path), texts=True)
    assert len(list(read_rows(piece))) == 3
    (tmp_path / "1.txt").write_text("text 7")
    with pytest.raises(DataError, match=r"changed after this job listed it"):
        list(read_rows(piece))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_texts_of_benchmarks_that_change_are_told(name, tmp_path):
    def write(word: str) -> None:
        (tmp_path / name).write_text(word if name == "a.txt" else json.dumps({"text": word}))

    write("one")
    (source,) = find_sources([name], str(tmp_path))
    assert list(read_texts(source)) == ["one"]
    write("two")
    with pytest.raises(DataError, match=r"the file changed since the job listed it"):
        list(read_texts(source))

"""The user's own pairs: every row is read or rejected with its reason."""

import csv
import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import made_records

from rayembed.config.data import DatasetConfig
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed.data.sources import files as pairs
from rayembed.data.sources.cells import RowError
from rayembed.data.sources.check import with_source_path
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.sources.rows import BadRow, Row, check_columns, read_rows
from rayembed.data.sources.tasks import ConvertRows, HeldOut
from rayembed.errors import ArtifactError, ConfigError, DataError

ROWS = [
    {"query": f"q {i}", "positive": f"p {i}" if i % 2 else [f"p {i}", f"p {i} b"]}
    for i in range(50)
]


def dataset(path: Path | str, **source: Any) -> DatasetConfig:
    return DatasetConfig(
        name="own", source=PairsSource(path=str(path), **source), query_instruction="Find"
    )


def rows_of(path: Path) -> list[Any]:
    pieces = list_pieces(str(path))
    rows = [row for piece in pieces for row in read_rows(piece)]
    return [row.values if isinstance(row, Row) else row for row in rows]


def convert_row(row: dict[str, Any], config: DatasetConfig) -> Record:
    (made,) = config.source.records(config, Row("file#0", row))
    assert made.origin == ("file#0",)
    return made


@pytest.mark.parametrize("size", [1, 7, 64, 100, 10_000])
def test_jsonl_pieces_cover_every_line_once(size: int, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS) + json.dumps({"query": "é"}))
    monkeypatch.setattr(pairs, "_BYTES_PER_PIECE", size)
    assert rows_of(path) == [*ROWS, {"query": "é"}]
    assert len(list_pieces(str(path))) == max(1, -(-path.stat().st_size // size))


def test_csv_parquet_gzip_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    with (folder / "b.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["query", "positive"])
        writer.writeheader()
        writer.writerow({"query": "two\nlines, here", "positive": '["a", "b"]'})
    table = pa.table({"query": ["x", "y"], "positive": [["1"], ["2", "3"]]})
    pq.write_table(table, folder / "sub" / "c.parquet", row_group_size=1)
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write('{"query": "zipped", "positive": "z"}\n')
    (folder / "_SUCCESS").write_text("")
    (folder / ".hidden.txt").write_text("")
    rows = rows_of(folder)
    assert [row["query"] for row in rows] == ["zipped", "two\nlines, here", "x", "y"]
    made, _ = made_records(tmp_path / "out", {"kind": "pairs", "path": str(folder)})
    assert [m.positives for m in made] == [("z",), ("a", "b"), ("1",), ("2", "3")]
    (folder / "notes.txt").write_text("?")
    with pytest.raises(DataError, match=r"notes.txt.*ending is not one of \.jsonl"):
        list_pieces(str(folder))


def test_missing_empty_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file, folder or prefix"):
        list_pieces(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder holds no files"):
        list_pieces(str(tmp_path / "empty"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list_pieces(str(tmp_path / "x.parquet"))
    folder = tmp_path / "tables"
    folder.mkdir()
    schema = pa.schema([("query", pa.string()), ("positive", pa.string())])
    pq.ParquetWriter(folder / "a.parquet", schema).close()
    with pytest.raises(DataError, match=r"tables' are empty: no Parquet file there has any rows"):
        list_pieces(str(folder))
    pq.write_table(pa.table({"query": ["q"], "positive": ["p"]}), folder / "b.parquet")
    assert [p.path for p in list_pieces(str(folder))] == [str(folder / "b.parquet")]
    (tmp_path / "x.csv").write_bytes(b"query,\xff\xfe\na,b\n")
    with pytest.raises(ArtifactError, match="cannot read the rows"):
        rows_of(tmp_path / "x.csv")


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("origins", [None, "id"])
def test_only_folders_that_a_step_made_are_advised_to_be_removed(
    made: bool, origins: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "precious.parquet"
    path.write_bytes(b"PAR1 broken")
    piece = FilePiece(str(path), path.name, "parquet", origins=origins, made=made)
    with pytest.raises(ArtifactError, match=f"cannot read the rows '{path}'") as caught:
        list(read_rows(piece))
    assert (f"Remove the folder '{tmp_path}'" in str(caught.value)) is made


def test_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "positives": ["p"]}\n')
    (piece,) = list_pieces(str(path))
    with pytest.raises(
        ConfigError, match=r"source.positive = 'positive'.*did you mean 'positives'"
    ):
        check_columns(piece, {"source.query": "question", "source.positive": "positive"})
    check_columns(piece, {"source.query": "question", "source.positive": "positives"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"positive": "p"}, "no query"),
        ({"query": " \n", "positive": "p"}, "no query"),
        ({"query": "\u200b\ufeff", "positive": "p"}, "query has no visible character"),
        ({"query": " \u0301\ufffd", "positive": "p"}, "query has no visible character"),
        ({"query": "q", "positive": "\u0301"}, "positive has no visible character"),
        ({"query": "q", "positive": ["", "\x00"]}, "positive has no visible character"),
        ({"query": ["q"], "positive": "p"}, "column 'query' is not a text"),
        ({"query": "q"}, "no positive"),
        ({"query": "q", "positive": []}, "no positive"),
        ({"query": "q", "positive": ["", None]}, "no positive"),
        ({"query": "q", "positive": "q"}, "positive equals query"),
        (
            {"query": "q", "positive": {"a": 4}},
            "column 'positive' is neither a text nor a list of texts",
        ),
        (
            {"query": "q", "positive": "p", "neg": {"a": 1}},
            "column 'neg' is neither a text nor a list of texts",
        ),
        ({"query": "q", "positive": "p", "task": ["t"]}, "column 'task' is not a text"),
    ],
)
def test_reasons(row: dict[str, Any], reason: str) -> None:
    config = dataset("x", negatives="neg", instruction="task", label="class")
    with pytest.raises(RowError) as refused:
        convert_row(row, config)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    "row",
    [
        {"query": "abc\ud83d", "positive": "p"},
        {"query": "q", "positive": ["p", "abc\ud83d"]},
        {"query": "q", "positive": "p", "meta": {"neg": ["\ude00 n"]}},
        {"query": "q", "positive": "p", "task": "t\ud83d"},
        {"query": "q", "positive": "p", "class": "c\udfff\ud800"},
    ],
)
def test_half_of_a_surrogate_pair_costs_its_row_where_it_is_read(row: Any, tmp_path: Path) -> None:
    whole = {"query": "\U0001f600", "positive": "p", "unread": "\ud83d"}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (row, whole))))
    (piece,) = list_pieces(str(tmp_path / "rows.jsonl"))
    bad, good = read_rows(piece, ["query", "positive", "meta.neg", "task", "class"])
    assert isinstance(bad, BadRow)
    assert bad.reason == "not valid Unicode"
    assert isinstance(good, Row)
    assert good.values["query"] == "\U0001f600"


def test_a_row_becomes_a_record() -> None:
    config = dataset("x", negatives="neg", label="class", instruction="task")
    row = {
        "query": "q",
        "positive": ["p", "q", "\u200b", "p2", "p"],
        "neg": ["n", "p", "q", "", "n", "\u0301", "\ufffd ", "m"],
        "class": 3,
        "task": "Own task",
    }
    made = convert_row(row, config)
    assert isinstance(made, Record)
    assert made.positives == ("p", "p2")
    assert [n.text for n in made.negatives] == ["n", "m"]
    assert made.negatives[0].rule == "given"
    assert made.label == "3"
    assert made.query_instruction == "Own task"
    assert convert_row(row | {"task": None}, config).query_instruction == "Find"
    assert convert_row(dict(row), config).id == made.id
    assert convert_row(row | {"query": "r"}, config).id != made.id


def test_every_row_is_kept_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"query": "q1", "positive": "p1"}),
        "{not json",
        "[1, 2]",
        '"a text"',
        json.dumps({"query": "", "positive": "p"}),
        json.dumps({"query": "held", "positive": "p2"}),
        json.dumps({"query": "q1", "positive": "p1"}),
        r'{"query": "half a pair \ud83d", "positive": "p"}',
        r'{"query": "a whole pair \ud83d\ude00", "positive": "p"}',
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n{"query": "\xff", "positive": "p"}\n')
    held = HeldOut(texts=frozenset([text_hash("held")]))
    (piece,) = list_pieces(str(path))
    config = dataset(path)
    columns, make = tuple(config.source.columns.values()), partial(config.source.records, config)
    result = ConvertRows(str(tmp_path / "out"), held, columns, make)(piece)
    assert result["rejected"] == {
        "not JSON": 1,
        "neither a JSON object nor a list": 1,
        "no query": 2,
        "has a held-out text": 1,
        "not UTF-8": 1,
        "not valid Unicode": 1,
    }
    assert (result["rows_in"], result["rows_out"]) == (10, 3)
    json.dumps(result, ensure_ascii=False).encode()  # as manifests keep it
    assert {e["reason"] for e in result["examples"]} == set(result["rejected"])
    assert any("{not json" in e["row"] for e in result["examples"])


def test_relative_paths_start_at_the_root() -> None:
    assert with_source_path(dataset("a/b.jsonl"), "s3://k/x/").source.path == "s3://k/x/a/b.jsonl"
    assert with_source_path(dataset("/a/b"), "/root").source.path == "/a/b"
    assert with_source_path(dataset("s3://a/b"), "/root").source.path == "s3://a/b"
    assert with_source_path(dataset("a"), "").source.path == "a"

"""One bad row costs one row, whatever is wrong with it; settings that no row depends on."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import made_records

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.cleaning.evaluation_texts import find_sources, read_texts
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.sources import files
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import BadRow, read_rows
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import ArtifactError, DataError

LENIENT = 0.6
BAD_TEXT = b"ol\xe9"


def pairs_of(path: Path, **settings: Any) -> dict[str, Any]:
    return {"kind": "pairs", "path": str(path), "max_rejected_share": LENIENT, **settings}


def test_tables_of_pandas_have_a_first_column_without_a_name(tmp_path: Path) -> None:
    content = ",query,positive\n0,q 0,p 0\n1,q 1,p 1\n2,q 2,p 2,more\n"
    (tmp_path / "a.csv").write_text(content)
    records, made = made_records(tmp_path / "out", pairs_of(tmp_path / "a.csv"))
    assert [r.query for r in records] == ["q 0", "q 1"]
    assert made.manifest["rejected"] == {"more cells than columns": 1}


def deep_json(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    lines = ['{"query": "q", "positive": "p"}', f'{{"query": "r", "x": {deep_json(5000)}}}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    records, made = made_records(tmp_path / "out", pairs_of(tmp_path / "a.jsonl"))
    assert [r.query for r in records] == ["q"]
    assert made.manifest["rejected"] == {"JSON too deeply nested": 1}
    (tmp_path / "b.csv").write_text(f"query,positive\nq,{deep_json(5000)}\n")
    (record,), _ = made_records(tmp_path / "out", pairs_of(tmp_path / "b.csv"))
    assert record.positives == (deep_json(5000),), "a text like any other"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_a_cell_that_is_not_utf_8(name: str, tmp_path: Path) -> None:
    comma = b"\t" if "tsv" in name else b","
    rows = [b"query,positive", "q ü,p ü".encode(), b"q 1," + BAD_TEXT, b"q 2,p 2"]
    content = "\ufeff".encode() + b"\n".join(rows).replace(b",", comma)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    records, made = made_records(tmp_path / "out", pairs_of(tmp_path / name))
    assert [(r.query, r.origin) for r in records] == [
        ("q ü", (f"{name}#0",)),
        ("q 2", (f"{name}#2",)),
    ]
    assert made.manifest["rejected"] == {"not UTF-8": 1}
    assert "ol" in made.manifest["examples"][0]["row"]


def test_a_file_whose_first_line_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"query," + BAD_TEXT + b"\nq,p\n")
    with pytest.raises(ArtifactError, match=r"a\.csv.*first line is not UTF-8"):
        made_records(tmp_path / "out", pairs_of(tmp_path / "a.csv"))


def bad_strings(values: list[bytes]) -> pa.Array:
    """A column of texts whose bytes nobody checked."""
    whole = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), whole.buffers())


def test_a_text_of_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    texts = [b"p 0", b"p 1", BAD_TEXT, b"p 3"]
    columns = {"query": [f"q {i}" for i in range(4)], "positive": bad_strings(texts)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    records, made = made_records(tmp_path / "out", pairs_of(tmp_path / "a.parquet"))
    assert [(r.query, r.origin[0]) for r in records] == [
        (f"q {i}", f"a.parquet#{i}") for i in (0, 1, 3)
    ]
    assert made.manifest["rejected"] == {"not UTF-8": 1}
    (piece,) = list_pieces(str(tmp_path / "a.parquet"))
    (bad,) = [row for row in read_rows(piece) if isinstance(row, BadRow)]
    assert (bad.origin, bad.shown) == ("a.parquet#2", repr(BAD_TEXT))


HALF = "\\ud83d"
"""Half of an emoji, as JSON writes it."""


def test_half_of_a_surrogate_pair_in_what_is_joined(tmp_path: Path) -> None:
    corpus = [{"_id": "d0", "text": "x"}, {"_id": "d1", "text": "y"}]
    queries = [
        '{"_id": "q0", "text": "a", "lang": "en"}',
        f'{{"_id": "q1", "text": "b", "lang": "{HALF}"}}',
        f'{{"_id": "{HALF}", "text": "c", "lang": "en"}}',
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (tmp_path / "queries.jsonl").write_text("\n".join(queries))
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td1\t1\n")
    beir = {
        "kind": "beir",
        **{"path": "qrels.tsv", "corpus": "corpus.jsonl", "queries": "queries.jsonl"},
        **{"language": "lang", "max_rejected_share": LENIENT},
    }
    (record,), made = made_records(tmp_path / "out", beir, root=tmp_path)
    assert (record.query, record.language) == ("a", "en")
    assert made.manifest["rejected"] == {"query is not among the queries": 1}
    nli = [
        '{"premise": "p", "hypothesis": "h", "label": 0, "lang": "en"}',
        f'{{"premise": "q", "hypothesis": "h", "label": 0, "lang": "{HALF}"}}',
    ]
    (tmp_path / "nli.jsonl").write_text("\n".join(nli))
    source = pairs_of(tmp_path / "nli.jsonl", kind="nli", language="lang")
    (record,), made = made_records(tmp_path / "out", source)
    assert made.manifest["rejected"] == {"not valid Unicode": 1}


@pytest.mark.parametrize("line", [f'{{"text": "{HALF}"}}', deep_json(5000)])
def test_evaluation_texts_that_are_no_texts(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    (source,) = find_sources(["a.jsonl"], str(tmp_path))
    with pytest.raises(DataError, match=r"cannot read texts from .*a\.jsonl"):
        list(read_texts(source))


def test_only_cells_of_csv_and_tsv_are_read_as_json_lists(tmp_path: Path) -> None:
    text = '["a", "b"]'
    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "q", "positive": text}))
    pq.write_table(pa.table({"query": ["q"], "positive": [text]}), tmp_path / "a.parquet")
    (tmp_path / "a.tsv").write_text(f"query\tpositive\nq\t{text}\n")
    positives = {
        name: made_records(tmp_path / "out", pairs_of(tmp_path / name))[0][0].positives
        for name in ("a.jsonl", "a.parquet", "a.tsv")
    }
    assert positives == {"a.jsonl": (text,), "a.parquet": (text,), "a.tsv": ("a", "b")}


def test_equal_texts_of_other_classes_or_languages_are_other_records(tmp_path: Path) -> None:
    row = {"query": "q", "positive": "p"}
    told = [{}, {"class": "a"}, {"class": "b"}, {"lang": "a"}, {"class": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | more) + "\n" for more in told))
    named = pairs_of(tmp_path / "a.jsonl", label="class", language="lang")
    records, made = made_records(tmp_path / "out", named)
    assert [(r.label, r.language) for r in records] == [
        (None, None),
        ("a", None),
        ("b", None),
        (None, "a"),
    ]
    assert made.manifest["dropped"] == {"duplicate": 1}
    (plain,), _ = made_records(tmp_path / "out", pairs_of(tmp_path / "a.jsonl"))
    assert plain.id == records[0].id
    assert plain.id == "own/c0620607643f48bf49be95ca85e8a9f3", (
        "ids of rows without a class stay what they were"
    )


def test_a_hidden_name_is_read_where_the_path_names_it(tmp_path: Path) -> None:
    for name in ("_a.jsonl", ".b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"query": "q", "positive": "p"}')
    for name in ("_a.jsonl", ".b.jsonl"):
        assert [piece.name for piece in list_pieces(str(tmp_path / name))] == [name]
    assert [piece.name for piece in list_pieces(str(tmp_path))] == ["c.jsonl"]


def test_the_share_of_bad_rows_is_no_reason_to_convert_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 40)
    rows = ['{"query": "q", "positive": "p"}', "not JSON", '{"query": "r", "positive": "s"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    done: list[Any] = []

    def execute(task, units, needs="cpu"):
        for unit in units:
            done.append(unit)
            yield task(unit)

    def made(share: float) -> Any:
        source = pairs_of(tmp_path / "a.jsonl", max_rejected_share=share)
        config = parse(DatasetConfig, {"name": "own", "source": source})
        pipeline_context = PipelineContext(str(tmp_path / "out"), 0, execute)
        return make_records(pipeline_context, check_source(config, ""), HeldOut())

    with pytest.raises(DataError, match=r"1 of 3 rows .*more than the allowed share 0\.1"):
        made(0.1)
    assert done
    done.clear()
    first = made(0.5)
    assert done == [], "all rows were read"
    assert made(0.4).reused
    assert made(0.4).folder == first.folder
    with pytest.raises(DataError, match=r"1 of 3 rows .*the allowed share 0\.2\. .*\n.*not JSON"):
        made(0.2)

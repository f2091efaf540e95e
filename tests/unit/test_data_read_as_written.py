"""Files are read as they were written, in every format and by every reader, or refused by name."""

import csv
import json
import string
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from made_records import made_records

from rayembed.api.training import look_at
from rayembed.config.held_out import HeldOutIds
from rayembed.data.cleaning.evaluation_texts import find_sources, read_texts
from rayembed.data.given_rows import rows_file
from rayembed.data.held_out.choice import listed_values
from rayembed.data.mining.documents import documents_in
from rayembed.data.sources import files
from rayembed.data.sources.cells import looks_like_list
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import Row, lines_of, read_rows
from rayembed.errors import ArtifactError, ConfigError, DataError, RayembedError
from rayembed.evaluation.own_data import find_files, write_set
from rayembed.evaluation.own_tables import OwnTable, write_tables

ODD = "\",\n\t;[]{}'\\%?*&#\r\ufeff\u2028\u2029\x85\x0b\x0c\x1c\u200b 0é漢😀|"
"""Signs that some format, or some reader of lines, takes for more than signs."""

FEW = settings(max_examples=20, derandomize=True, phases=[Phase.generate])


def odd_text(word: str) -> st.SearchStrategy[str]:
    """A word between odd signs, which is no list."""
    ends = st.text(ODD, max_size=5)
    texts = st.tuples(ends, ends).map(lambda around: f"{around[0]}{word}{around[1]}")
    return texts.filter(lambda text: not looks_like_list(text) and not is_json(text))


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


@st.composite
def odd_pairs(draw: st.DrawFn) -> list[tuple[str, str]]:
    count = draw(st.integers(1, 12))
    return [(draw(odd_text(f"q{i}")), draw(odd_text(f"p{i}"))) for i in range(count)]


def write_csv(path: Path, rows: list[dict[str, Any]], **form: Any) -> None:
    with path.open("w", encoding=form.pop("encoding", "utf-8"), newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), **form)
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, rows: list[dict[str, Any]], *, ascii_only: bool = False) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="")


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "plain.csv": write_csv,
    "bom.csv": lambda path, rows: write_csv(path, rows, encoding="utf-8-sig"),
    "all.csv": lambda path, rows: write_csv(path, rows, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "pandas.csv": lambda path, rows: pd.DataFrame(rows).to_csv(
        path, index=False, lineterminator="\r\n"
    ),
    "plain.jsonl": write_jsonl,
    "ascii.jsonl": lambda path, rows: write_jsonl(path, rows, ascii_only=True),
    "arrow.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
    "pandas.parquet": lambda path, rows: pd.DataFrame(rows).to_parquet(path, index=False),
}


def read_pairs(folder: Path, path: Path) -> list[tuple[str, str]]:
    records, made = made_records(folder / "out", {"kind": "pairs", "path": str(path)})
    assert made.manifest["rejected"] == {}
    return [(record.query, *record.positives) for record in records]


def read_table(folder: Path, path: Path) -> list[tuple[str, str]]:
    """The rows as those of an own set of pairs to be classified."""
    table = OwnTable(str(path), "test", tuple(list_pieces(str(path))))
    folder = folder / "table"
    folder.mkdir()
    write_tables((table,), "pairs", folder)
    with pa.memory_map(str(folder / "test.arrow")) as file:
        found = pa.ipc.open_stream(file).read_all()
    return [(row["sentence1"], row["sentence2"]) for row in found.to_pylist()]


@FEW
@given(odd_pairs(), st.sampled_from(sorted(WRITERS)), st.sampled_from([40, 1 << 25]))
def test_what_a_writer_of_a_format_wrote_is_read(rows, form, bytes_of_a_piece):
    """Pairs, documents, benchmark texts, own tables, and the look of `train` at the same file."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BYTES_PER_PIECE", bytes_of_a_piece)
        folder = Path(place)
        path = folder / form
        WRITERS[form](path, [{"query": q, "positive": p} for q, p in rows])
        assert read_pairs(folder, path) == rows
        assert list(documents_in(str(path), "positive")) == [p for _, p in rows]
        look = look_at(str(path), delimiter=None, encoding=None)
        assert (look.rows, look.columns) == (len(rows), {"query", "positive"})
        own = [{"sentence1": q, "sentence2": p, "label": i % 2} for i, (q, p) in enumerate(rows)]
        if len(own) > 1:
            WRITERS[form](folder / f"own-{form}", own)
            assert read_table(folder, folder / f"own-{form}") == rows
        if not form.endswith(".csv"):
            WRITERS[form](path, [{"text": text} for row in rows for text in row])
            (source,) = find_sources([str(path)], "")
            assert list(read_texts(source)) == [text for row in rows for text in row]


@FEW
@given(odd_pairs(), st.booleans())
def test_what_tsv_can_hold_is_read(rows, crlf):
    plain = str.maketrans("", "", '\t\n\r"')
    rows = [(q.translate(plain), p.translate(plain)) for q, p in rows]
    with TemporaryDirectory() as place:
        path, end = Path(place, "a.tsv"), "\r\n" if crlf else "\n"
        lines = ["query\tpositive", *("\t".join(row) for row in rows)]
        path.write_text(end.join(lines), encoding="utf-8", newline="")
        assert read_pairs(Path(place), path) == rows


@settings(FEW, max_examples=5)
@given(odd_pairs())
def test_rows_in_memory_are_those_of_a_file(rows):
    dicts = [{"query": q, "positive": p} for q, p in rows]
    with TemporaryDirectory() as place:
        for number, held in enumerate((rows, dicts, pd.DataFrame(dicts), iter(dicts))):
            path = rows_file(held, f"{place}/{number}")
            assert read_pairs(Path(place, str(number)), Path(path)) == rows


@FEW
@given(st.data())
def test_texts_and_ids_one_a_line_are_read(data):
    breaks = str.maketrans("", "", "\n\r\ufeff")
    count = data.draw(st.integers(1, 8))
    texts = [data.draw(odd_text(f"w{i}")).translate(breaks) for i in range(count)]
    with TemporaryDirectory() as place:
        for end in ("\n", "\r\n"):
            content = end.join(texts)
            for encoding in ("utf-8", "utf-8-sig"):
                Path(place, "a.txt").write_text(content, encoding=encoding, newline="")
                (source,) = find_sources(["a.txt"], place)
                assert list(read_texts(source)) == texts
                held_out = HeldOutIds(column="id", file="a.txt")
                assert listed_values(held_out, place) == [text.strip() for text in texts]


def test_lines_of_old_files_and_of_none():
    assert lines_of(b"a\rb\rc") == ["a", "b", "c"]
    assert lines_of(b"a\x0bb\r\nc\rd\n") == ["a\x0bb", "c\rd", ""]
    with pytest.raises(UnicodeError, match=r"line 3 is not UTF-8 \(b'\\xff'\)"):
        lines_of(b"a\nb\n\xff")


def test_a_list_of_ids_that_is_not_utf_8_is_refused_with_its_line(tmp_path):
    (tmp_path / "dev.txt").write_bytes(b"a\nol\xe9\n")
    with pytest.raises(DataError, match=r"held_out.file .*dev\.txt.*line 2 is not UTF-8"):
        listed_values(HeldOutIds(column="id", file="dev.txt"), str(tmp_path))
    (tmp_path / "texts.txt").write_bytes(b"a\n\xe9\n")
    (source,) = find_sources(["texts.txt"], str(tmp_path))
    with pytest.raises(DataError, match=r"texts\.txt.*line 2 is not UTF-8"):
        list(read_texts(source))


# ---- quotes that do not close


def plain_lines(count: int) -> list[str]:
    return [f"how do I do thing {i},Thing {i} is done by pressing it" for i in range(count)]


def csv_of(path: Path, lines: list[str], head: str = "query,positive") -> Path:
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    return path


def with_quote(line: str, cell: int, *, end: bool = False) -> str:
    cells = line.split(",")
    cells[cell] = cells[cell] + '"' if end else '"' + cells[cell]
    return ",".join(cells)


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "pairs": read_pairs,
    "documents": lambda folder, path: list(documents_in(str(path), "positive")),
    "train": lambda folder, path: look_at(str(path), delimiter=None, encoding=None),
    "own table": lambda folder, path: write_tables(
        (OwnTable(str(path), "test", tuple(list_pieces(str(path)))),), "pairs", folder
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_unclosed_quote_is_refused_wherever_csv_is_read(reader, tmp_path):
    lines = plain_lines(3000)
    lines[1500] = with_quote(lines[1500], 1)
    path = csv_of(tmp_path / "a.csv", lines)
    with pytest.raises(
        RayembedError, match=r"line 1502: the cell '\"Thing 1500 is .*written twice"
    ):
        READERS[reader](tmp_path, path)


STRAY = settings(max_examples=120, derandomize=True, deadline=None, phases=[Phase.generate])


def rows_at(path: Path, **form: Any) -> list[list[str]]:
    """Cells of the rows; those that are rejected are left out."""
    (piece,) = list_pieces(str(path), versions=False, **form)
    return [list(row.values.values()) for row in read_rows(piece) if isinstance(row, Row)]


@STRAY
@given(st.data())
def test_stray_quotes_never_swallow_rows(data):
    """One at a cell's start, and a second one at a cell's start or end, at any distance."""
    draw = data.draw
    columns, distance = draw(st.integers(1, 5)), draw(st.integers(1, 9) | st.integers(1, 300))
    first = draw(st.integers(0, 30))
    rng = draw(st.randoms(use_true_random=False))
    blank, ragged = draw(st.sampled_from([0, 0.1, 0.5])), draw(st.sampled_from([0, 0.05, 0.3]))
    cells = [draw(st.integers(0, columns - 1)), draw(st.integers(0, columns - 1))]
    end, second = draw(st.booleans()), first + distance
    lines = []
    for row in range(second + draw(st.integers(1, 30))):
        texts = [f"text {row} of {column}" for column in range(columns)]
        if row == first:
            texts[cells[0]] = f'"{texts[cells[0]]}'
        elif row == second:
            texts[cells[1]] = f'{texts[cells[1]]}"' if end else f'"{texts[cells[1]]}'
        elif rng.random() < ragged:
            texts = [*texts, "more"] if columns == 1 or rng.random() < 0.5 else texts[1:]
        lines += [",".join(texts), *([""] if rng.random() < blank else [])]
    number = first + 2 + lines[: lines.index(next(one for one in lines if '"' in one))].count("")
    with TemporaryDirectory() as place:
        path = csv_of(Path(place, "a.csv"), lines, ",".join(f"c{i}" for i in range(columns)))
        with pytest.raises(ArtifactError, match=rf"line {number}: the cell .* opens a quote"):
            rows_at(path)
        meant = [line.split(",") for line in lines if line]
        assert rows_at(path, quotes="none") == [
            row + [None] * (columns - len(row)) for row in meant if len(row) <= columns
        ]


def test_rows_between_stray_quotes_are_known_though_most_of_them_are_ragged(tmp_path):
    for every, columns in product((2, 3), (1, 2)):
        row = ",".join(["text {0}"] * columns)
        lines = [row.format(i) + ",more" * (i % every > 0) for i in range(every * 50 + 2)]
        lines[0], lines[every * 50] = '"' + lines[0], lines[every * 50] + '"'
        lines[-1] = row.format("last")
        path = csv_of(tmp_path / f"{every}-{columns}.csv", lines, ",".join("ab"[:columns]))
        with pytest.raises(ArtifactError, match=r"line 2: the cell .* opens a quote"):
            rows_at(path)


@STRAY
@given(st.data())
def test_cells_of_several_lines_are_read_as_a_writer_of_csv_wrote_them(data):
    """Or refused, where they look like rows and the file does not quote all texts."""
    line = st.sampled_from(
        ["Hello", "yes, it is", "", "def f(a, b):", "    x = [1, 2],", 'say "hi", please', "}"]
    )
    cell = st.lists(line, min_size=1, max_size=6).map("\n".join).filter(str.strip)
    columns = data.draw(st.integers(1, 5))
    row = st.lists(cell, min_size=columns, max_size=columns)
    rows = data.draw(st.lists(row, min_size=1, max_size=20))
    with TemporaryDirectory() as place:
        path, head = Path(place, "a.csv"), [f"c{i}" for i in range(columns)]
        for quoting in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL):
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, quoting=quoting).writerows([head, *rows])
            assert rows_at(path, quotes="csv") == rows
            try:
                assert rows_at(path) == rows
            except ArtifactError as error:
                if quoting == csv.QUOTE_ALL or "set source.quotes=csv" not in str(error):
                    raise


def test_prose_and_code_of_several_lines_are_no_rows(tmp_path):
    """Not even with as many commas as rows have: in prose, spaces follow them."""
    texts = ["Dear all,\nthanks, Bob", "one, two\nthree, four\nfive, six", "f(a, b)\n\ng(c, d)"]
    rows = [{"query": f"q{i}", "positive": text} for i, text in enumerate(texts * 50)]
    write_csv(tmp_path / "a.csv", rows)
    assert read_pairs(tmp_path, tmp_path / "a.csv") == [(r["query"], r["positive"]) for r in rows]
    swapped = [{"positive": r["positive"], "query": r["query"]} for r in rows]
    write_csv(tmp_path / "b.csv", swapped)
    assert len(rows_at(tmp_path / "b.csv")) == len(rows)


def test_cells_that_look_like_rows_are_read_where_others_of_several_lines_do_not(tmp_path):
    """A program that quotes cells with line breaks leaves no stray quotes."""
    like = ["It was built in 1889.\nIt cost 7,799 francs.", "Main Street 5\nBerlin,Germany"]
    prose = "Dear all,\nthanks, Bob\nsee you, soon"
    for proofs, read in ((5, False), (6, True)):
        texts = [*like, *[prose] * proofs, *["plain"] * 20]
        rows = [{"query": f"q{i}", "positive": text} for i, text in enumerate(texts)]
        path = tmp_path / f"{proofs}.csv"
        write_csv(path, rows)
        if read:
            assert read_pairs(tmp_path, path) == [(r["query"], r["positive"]) for r in rows]
        else:
            with pytest.raises(ArtifactError, match=r"line 2: .* opens a quote"):
                rows_at(path)
    code = [{"query": f"q{i}", "positive": "def f(x):\n    return max(x,1)"} for i in range(20)]
    write_csv(tmp_path / "code.csv", code)
    assert len(rows_at(tmp_path / "code.csv")) == 20


def test_rows_whose_cells_begin_with_spaces_or_are_empty_are_swallowed_by_no_quotes(tmp_path):
    for name, row in (("spaced", "q{0}, answer {0}"), ("empty", "q{0},"), ("first", ",a{0}")):
        lines = [row.format(i) for i in range(60)]
        lines[20], lines[26] = 'q,"open', 'q,a 12"'
        path = csv_of(tmp_path / f"{name}.csv", lines)
        with pytest.raises(ArtifactError, match=r"line 22: .* opens a quote that closes 6 lines"):
            rows_at(path)


def test_a_row_that_two_quotes_have_shortened_is_rejected(tmp_path):
    lines = ['"how big is it,a 12",forum', "q,a,forum"]
    path = csv_of(tmp_path / "a.csv", lines, "query,positive,place")
    source = {"kind": "pairs", "path": str(path), "max_rejected_share": 1}
    records, made = made_records(tmp_path / "out", source)
    assert [record.query for record in records] == ["q"]
    assert made.manifest["rejected"] == {
        "fewer cells than columns, one with the delimiter within quotes": 1
    }


def test_what_quotes_are_can_be_set_for_a_job(tmp_path):
    lines = ['q,"open', 'r,a 12"', "s,t"]
    source = {"kind": "pairs", "path": str(csv_of(tmp_path / "a.csv", lines))}
    seen = {}
    for quotes in ("csv", "none"):
        records, _ = made_records(tmp_path / quotes, {**source, "quotes": quotes})
        seen[quotes] = [(record.query, *record.positives) for record in records]
        assert look_at(source["path"], delimiter=None, encoding=None, quotes=quotes).rows == len(
            seen[quotes]
        )
    assert seen["csv"] == [("q", "open\nr,a 12"), ("s", "t")]
    assert seen["none"] == [("q", '"open'), ("r", 'a 12"'), ("s", "t")]


def test_without_the_strict_reader_two_quotes_swallow_rows(tmp_path):
    """The control: Python's csv, as it is, reads 90 of 100 rows without an error."""
    lines = plain_lines(100)
    lines[50], lines[60] = with_quote(lines[50], 1), with_quote(lines[60], 0)
    path = csv_of(tmp_path / "a.csv", lines)
    with path.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 90


def test_a_quote_in_the_header_and_at_the_end_is_refused(tmp_path):
    for head, last in (('query,"positive', "q,p"), ("query,positive", 'q,"p')):
        path = csv_of(tmp_path / "a.csv", ["a,b", last], head)
        with pytest.raises(RayembedError, match=r"line [13]: the cell '\"p"):
            made_records(tmp_path / "out", {"kind": "pairs", "path": str(path)})


def test_quotes_within_words_and_cells_of_several_lines_are_read(tmp_path):
    rows = [
        {"query": 'a 5" screen', "positive": "one\n\ntwo, three\nfour, five"},
        {"query": '"quoted" at its start', "positive": "a\r\nb"},
        {"query": "long", "positive": "\n".join(f"line {i} of a poem" for i in range(40))},
    ]
    write_csv(tmp_path / "a.csv", rows)
    assert read_pairs(tmp_path, tmp_path / "a.csv") == [(r["query"], r["positive"]) for r in rows]
    (tmp_path / "b.csv").write_text('query,positive\na 5" screen,it is 6" wide\n')
    assert read_pairs(tmp_path, tmp_path / "b.csv") == [('a 5" screen', 'it is 6" wide')]


def test_a_carriage_return_without_quotes_is_refused_and_ends_the_lines_of_old_files(tmp_path):
    rows = [{"query": "q", "positive": "p"}, {"query": "one\rtwo", "positive": "p"}]
    path = tmp_path / "a.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    with pytest.raises(ArtifactError, match=r"line 3: a carriage return stands in a cell"):
        made_records(tmp_path / "out", {"kind": "pairs", "path": str(path)})
    path.write_bytes(b"query,positive\rq,p\rr,s\r")
    assert read_pairs(tmp_path, path) == [("q", "p"), ("r", "s")]
    (tmp_path / "a.tsv").write_bytes(b"query\tpositive\none\rtwo\tp\n")
    assert read_pairs(tmp_path, tmp_path / "a.tsv") == [("one\rtwo", "p")]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_tsv_with_quotes_around_cells_is_read_without_them(quoting, tmp_path):
    rows = [
        {"query": "plain", "positive": "before any quote"},
        {"query": 'say "hi"', "positive": "a,b"},
        {"query": "q", "positive": "two\nlines"},
        {"query": "r", "positive": "a\ttab"},
    ]
    form = {"delimiter": "\t", "lineterminator": "\n"}
    write_csv(tmp_path / "a.tsv", rows, quoting=quoting, **form)
    assert read_pairs(tmp_path, tmp_path / "a.tsv") == [(r["query"], r["positive"]) for r in rows]
    excel = 'query\tpositive\nplain\tp\n"a, b"\t"c"\n'
    (tmp_path / "b.tsv").write_text(excel)
    assert read_pairs(tmp_path, tmp_path / "b.tsv") == [("plain", "p"), ("a, b", "c")]
    assert rows_at(tmp_path / "b.tsv", quotes="none")[1] == ['"a, b"', '"c"']


@pytest.mark.parametrize("other", ['"to be" or not', '"', '"open'])
def test_one_cell_of_tsv_that_is_not_in_quotes_makes_all_quotes_signs(other, tmp_path):
    rows = [("a", '"to be"'), ("b", other), ("c", '"whole"')]
    for order in (rows, rows[::-1]):
        lines = ["query\tpositive", *map("\t".join, order)]
        (tmp_path / "a.tsv").write_text("\n".join(lines))
        assert read_pairs(tmp_path, tmp_path / "a.tsv") == order


def test_lines_within_quotes_of_tsv_that_look_like_rows_are_refused(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('query\tpositive\n"a"\tb\nq\t"open\nr\ta 12"\n')
    with pytest.raises(ArtifactError, match=r"line 3: the cell .* as rows have"):
        rows_at(path)
    assert rows_at(path, quotes="csv") == [["a", "b"], ["q", "open\nr\ta 12"]]
    assert rows_at(path, quotes="none") == [['"a"', "b"], ["q", '"open'], ["r", 'a 12"']]


def test_tsv_of_both_kinds_is_told(tmp_path):
    lines = ["query\tpositive", '"say ""hi"""\tp', '"to be" or not\tp']
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    source = {"kind": "pairs", "path": str(tmp_path / "a.tsv"), "max_rejected_share": 1}
    _, made = made_records(tmp_path / "out", source)
    told = "quoted as in CSV, unlike other cells: set source.quotes to csv or none"
    assert made.manifest["rejected"] == {told: 1}


# ---- two columns of one name


def test_two_columns_of_one_name_are_refused_by_it(tmp_path):
    csv_of(tmp_path / "a.csv", ["a,b,c"], "query,positive,positive")
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    table = pa.Table.from_arrays(columns, ["query", "positive", "positive"])
    pq.write_table(table, tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(RayembedError, match=r"two columns .*named 'positive'"):
            made_records(tmp_path / "out", {"kind": "pairs", "path": str(tmp_path / name)})
    frame = pd.DataFrame([["a", "b", "c"]], columns=["query", "positive", "positive"])
    with pytest.raises(DataError, match="two columns are named 'positive'"):
        rows_file(frame, str(tmp_path / "out"))
    csv_of(tmp_path / "b.csv", ["a,b,,"], "query,positive,,")
    assert read_pairs(tmp_path, tmp_path / "b.csv") == [("a", "b")], "columns without a name"


def test_a_key_twice_costs_its_row(tmp_path):
    lines = [
        '{"query": "q", "positive": "p"}',
        '{"query": "q", "positive": "one", "positive": "two"}',
        '{"query": "q", "positive": "p", "meta": {"a": 1, "a": 2}}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl"), "max_rejected_share": 1}
    records, made = made_records(tmp_path / "out", source)
    assert [record.positives for record in records] == [("p",)]
    assert made.manifest["rejected"] == {"key 'positive' twice": 1, "key 'a' twice": 1}


# ---- lists


@pytest.mark.parametrize(
    "cell",
    [
        str(["a", "b"]),
        str(["it's", 'say "b"']),
        "['a' 'b']",
        "['a'\n 'b']",
        "[None, 'a']",
        "['a', nan]",
        '["a", "b",]',
        '["a" "b"]',
        '[["a"], ["b"]]',
        '["a", 1]',
        '[{"text": "a"}]',
        "('a', 'b')",
        "{'a', 'b'}",
        "array(['a', 'b'], dtype=object)",
        "['a', 3]",
        "[3, 'a']",
        "['a', ...]",
    ],
)
def test_lists_that_are_no_json_lists_of_texts_are_rejected(cell, tmp_path):
    forms = ["plain.csv", "plain.jsonl", "arrow.parquet", "memory"]
    for form in forms[:1] if is_json(cell) else forms:  # where lists can be lists, JSON is a text
        for column in ("positive", "hard"):
            rows = [{"query": "q", "positive": "p", "hard": "n", column: cell}] * 3
            path = tmp_path / form
            if form == "memory":
                path = Path(rows_file(rows, str(tmp_path)))
            else:
                WRITERS[form](path, rows)
            source = {"kind": "pairs", "path": str(path), "negatives": "hard"}
            told = rf"3 × column '{column}' is a (list that is no|JSON list)"
            with pytest.raises(DataError, match=told):
                made_records(tmp_path / "out", source)


def test_empty_negatives_in_memory_are_none(tmp_path):
    frame = pd.DataFrame({"query": ["q"], "positive": ["p"], "negatives": [""]})
    assert rows_file(frame, str(tmp_path))


def test_lists_that_are_no_json_are_neither_counted_as_none_nor_taken_in_memory(tmp_path):
    cell = "['a', 'b']"
    write_jsonl(tmp_path / "a.jsonl", [{"query": "q", "positive": "p", "negatives": cell}])
    assert look_at(str(tmp_path / "a.jsonl"), delimiter=None, encoding=None).negatives == 1
    with pytest.raises(DataError, match=r"row 0: the negatives are .*written as a text"):
        rows_file([("q", "p", cell)], str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "[Solved] how do I …",
        "[1, 2]",
        "[x]",
        "[a] and [b]",
        "['solved'] how",
        "a ['b']",
        "[",
        "('a')",
        "array",
        "{'a': 1}",
    ],
)
def test_texts_in_brackets_are_texts(text, tmp_path):
    write_csv(tmp_path / "a.csv", [{"query": "q", "positive": text}])
    assert read_pairs(tmp_path, tmp_path / "a.csv") == [("q", text)]


def test_lists_of_json_are_read_also_with_space_around_them(tmp_path):
    cells = ['["a", "b"]', ' ["a", "b"] ', '["a", null, "b"]']
    rows = [{"query": f"q{i}", "positive": "p", "n": cell} for i, cell in enumerate(cells)]
    write_csv(tmp_path / "a.csv", rows)
    source = {"kind": "pairs", "path": str(tmp_path / "a.csv"), "negatives": "n"}
    records, _ = made_records(tmp_path / "out", source)
    assert [[n.text for n in record.negatives] for record in records] == [["a", "b"]] * 3


@pytest.mark.parametrize(
    "content", ['[{"query": "q"}, {"query": "r"}]', '[\n {"query": "q"}\n]', "[[]]"]
)
def test_an_array_in_jsonl_is_told_as_in_json(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"one JSON array, but must be JSONL"):
        made_records(tmp_path / "out", {"kind": "pairs", "path": str(tmp_path / "a.jsonl")})
    (tmp_path / "b.jsonl").write_text('[["q"], ["p"]]\n[["r"], ["s"]]\n')
    (piece,) = list_pieces(str(tmp_path / "b.jsonl"))
    assert [row.values for row in read_rows(piece)] == [
        {"0": ["q"], "1": ["p"]},
        {"0": ["r"], "1": ["s"]},
    ]


# ---- columns that begin late


def test_a_column_may_begin_in_any_row_of_jsonl(tmp_path):
    row: dict[str, Any] = {"query": "q", "positive": "p"}
    late = [{**row, "query": f"q {i}"} for i in range(1500)] + [
        {**row, "negatives": ["n n", "m m"]}
    ]
    write_jsonl(tmp_path / "a.jsonl", late)
    assert look_at(str(tmp_path / "a.jsonl"), delimiter=None, encoding=None).negatives == 2
    source = {"kind": "pairs", "path": str(tmp_path / "a.jsonl")}
    _, made = made_records(tmp_path / "out", source)
    assert made.manifest["unread_columns"] == [{"column": "negatives"}]
    records, made = made_records(tmp_path / "out", {**source, "negatives": "negatives"})
    assert [n.text for n in records[-1].negatives] == ["n n", "m m"]
    with pytest.raises(ConfigError, match="has no such column"):
        made_records(tmp_path / "out", {**source, "negatives": "other"})


def test_lists_in_a_csv_are_counted_as_negatives(tmp_path):
    cells = [json.dumps(["n", "m", "o"]), "one text"]
    rows = [{"query": f"q{i}", "positive": "p", "negatives": c} for i, c in enumerate(cells)]
    write_csv(tmp_path / "a.csv", rows)
    assert look_at(str(tmp_path / "a.csv"), delimiter=None, encoding=None).negatives == 3


# ---- encodings, numbers, headers


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8"])
def test_a_byte_order_mark_is_none_where_a_setting_names_utf_8(encoding, tmp_path):
    (tmp_path / "a.csv").write_text("query,positive\nq,p\n", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"query": "q", "positive": "p"}', encoding="utf-8-sig")
    for name in ("a.csv", "a.jsonl"):
        source = {"kind": "pairs", "path": str(tmp_path / name), "encoding": encoding}
        (record,), _ = made_records(tmp_path / "out", source)
        assert (record.query, record.positives) == ("q", ("p",))


@pytest.mark.parametrize("score", ["inf", "-Infinity", "1e999", "nan"])
def test_a_score_without_end_is_none(score, tmp_path):
    rows = [
        {"sentence1": "a", "sentence2": "b", "score": score},
        {"sentence1": "c", "sentence2": "d", "score": 5},
    ]
    write_csv(tmp_path / "a.csv", rows)
    path = str(tmp_path / "a.csv")
    records, made = made_records(
        tmp_path / "out", {"kind": "sts", "path": path, "max_rejected_share": 1}
    )
    assert len(records) == 2
    assert made.manifest["rejected"] == {"column 'score' is not a number": 1}


def test_bytes_are_told_as_such(tmp_path):
    pq.write_table(pa.table({"query": [b"q"], "positive": ["p"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'query' holds bytes, not a text; decode them"):
        made_records(tmp_path / "out", {"kind": "pairs", "path": str(tmp_path / "a.parquet")})


@pytest.mark.parametrize("judged", ["q 0 d 1\nq 0 e 0\n", "q\td\t1\nq\te\t0\n"])
def test_judgements_without_a_header_are_told_how_to_get_one(judged, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "x"}\n{"_id": "e", "text": "y"}')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "x"}')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text(judged)
    with pytest.raises(DataError, match=r"the first line must hold the names query-id.*TREC"):
        write_set(find_files(str(tmp_path), "test"), tmp_path)


def test_rows_of_one_id_are_told(tmp_path, caplog):
    for shard in "ab":
        rows = [{"id": i, "query": f"{shard}{i}", "positive": "p"} for i in range(5)]
        write_jsonl(tmp_path / f"{shard}.jsonl", rows)
    source = {"kind": "pairs", "path": str(tmp_path / "*.jsonl"), "id": "id"}
    records, _ = made_records(tmp_path / "out", source)
    assert len(records) == 5
    assert "5 rows have the id of an earlier row (source.id = 'id')" in caplog.text


# ---- names of files


def test_names_stand_for_themselves(tmp_path, monkeypatch):
    for name in ("a*b.jsonl", "axb.jsonl", "q?.jsonl", "[1].jsonl", "x%20y.jsonl", "x y.jsonl"):
        write_jsonl(tmp_path / name, [{"query": name, "positive": "p"}])

    def queries(path: str) -> list[str]:
        return [
            row.values["query"]
            for piece in list_pieces(path)
            for row in read_rows(piece)
            if isinstance(row, Row)
        ]

    for name in ("a*b.jsonl", "q?.jsonl", "[1].jsonl", "x%20y.jsonl", "x y.jsonl"):
        assert queries(str(tmp_path / name)) == [name]
    assert queries(str(tmp_path / "a*.jsonl")) == ["a*b.jsonl", "axb.jsonl"]
    for pattern in ("q[?].jsonl", "{q,a}.jsonl", "a?b.jsonl"):
        with pytest.raises(DataError, match=r"only the wildcards \* and \*\* are known"):
            list_pieces(str(tmp_path / pattern))
    monkeypatch.setenv("HOME", str(tmp_path))
    (record,), _ = made_records(
        tmp_path / "out", {"kind": "pairs", "path": "~/x y.jsonl"}, root=tmp_path / "root"
    )
    assert record.query == "x y.jsonl"


def test_nobody_is_advised_to_remove_a_folder_of_their_own(tmp_path):
    write_jsonl(tmp_path / "mine.jsonl", [{"query": "q", "positive": "p"}])
    source = {"kind": "records", "path": str(tmp_path)}
    for content in (None, "{}", '{"name": "an app"}'):
        if content is not None:
            (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"has no manifest\.json of a data job") as error:
            made_records(tmp_path / "out", source)
        assert "Remove" not in str(error.value)


def test_the_alphabet_has_what_splits_lines():
    """Were it without them, the tests above would say nothing."""
    breaks = {sign for sign in map(chr, range(0x3000)) if len(f"a{sign}b".splitlines()) > 1}
    assert len(breaks & set(ODD)) >= 8
    assert not set(ODD) & set(string.ascii_letters)

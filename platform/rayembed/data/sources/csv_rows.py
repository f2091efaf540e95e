"""Read rows of CSV and TSV files; refuse a file whose quotes can be understood in two ways.

Python's csv takes a cell whose quote is never closed to hold the rest of the file, or all rows up
to the next quote. Its strict mode raises where a quote closes within a cell or not at all; a quote
that closes at the end of another cell by chance is known by the lines of the cell:

    q50,"open                 a cell of two lines, or
    q51,a screen of 12"       two rows with a stray quote each?

TSV as registered knows no quotes: a tab ends a cell, a line ends a row. Programs that write CSV put
them into TSV, too, and are known by all cells of the file that begin with one.
"""

import csv
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, TextIO

from rayembed.config.types import is_unicode

NOT_UTF8 = "not UTF-8"

_ADVICE = (
    "Within a quoted cell a quote is written twice, as csv.writer and pandas' to_csv do it; write "
    "the file so with QUOTE_ALL, or as JSONL or Parquet. For a source of training data: where the "
    "lines are meant as one cell, set source.quotes=csv; where quotes are signs like any other and "
    "no cell has a line break, set source.quotes=none"
)

_LARGEST_CELL = 1 << 26
"""Characters of a cell; a longer one comes from a quote that was not closed."""

_ROWS_LOOKED_AT = 1000
"""Number of first rows from which the format of a file is detected."""

_ROWS_IN_A_CELL = 4
"""Minimum number of row-like lines in a cell, and most of its lines, to count as rows. Lines of
prose or code hardly ever agree so long."""

_PROOF = 3
"""Number of ordinary multi-line cells for each suspect one that shows that a program wrote the
quotes."""

_SHARE = 20
"""Inverse share of rows with a cell that starts with a space from which this counts as the file's
style."""

_SHOWN_CHARACTERS = 40
_LINE_END = re.compile(r"\r\n|\n|\r")
_CELL_OF_CSV = re.compile(r'"(?:[^"]*+"")+[^"]*"')
"""A cell in quotes, within which each quote is written twice."""

Cells = tuple[dict[str, Any], str | None]
"""Cells of a row by column name, None for missing ones, and the reason if it is not a row."""


def csv_rows(
    opened: Callable[[], TextIO],
    *,
    tsv: bool = False,
    delimiter: str | None = None,
    quotes: str | None = None,
) -> Iterator[Cells]:
    """Read the rows of a CSV or TSV file.

    Args:
        opened: opens it with `newline=""`; TSV with quotes is read three times.
        delimiter: sign between cells; None: a comma, or a tab of TSV.
        quotes: "csv": they stand around cells, also around several lines that look like rows;
            "none": they are signs like any other; None: as in CSV, of TSV what its cells say.

    Raises:
        csv.Error: two columns have one name, the first line is not UTF-8, a quote does not close at
            the end of its cell, or lines within quotes may be rows; the message has the line where
            it opens.
    """
    sign = delimiter or ("\t" if tsv else ",")
    if quotes == "none" or (tsv and quotes is None):
        rows = _rows_of_lines(opened, sign, may_be_quoted=quotes is None)
    else:
        rows = _rows_of_csv(opened, sign, meant=quotes == "csv")
    names = next(rows, None)
    if names is None:
        return
    _check_names(names)
    for cells in rows:
        values: dict[str, Any] = {**dict.fromkeys(names), **dict(zip(names, cells, strict=False))}
        reason = None
        if further := cells[len(names) :]:
            values["…"], reason = further, "more cells than columns"
        elif len(cells) < len(names) and any(sign in cell for cell in cells):
            reason = "fewer cells than columns, one with the delimiter within quotes"
        elif not all(map(is_unicode, cells)):
            reason = NOT_UTF8
        elif tsv and quotes is None and any(map(_CELL_OF_CSV.fullmatch, cells)):
            reason = "quoted as in CSV, unlike other cells: set source.quotes to csv or none"
        yield values, reason


def _rows_of_csv(
    opened: Callable[[], TextIO], sign: str, *, meant: bool = False
) -> Iterator[list[str]]:
    csv.field_size_limit(_LARGEST_CELL)
    check = _QuoteCheck(sign, meant=meant)
    with opened() as text:
        lines = _Lines(text)
        reader = csv.reader(lines, delimiter=sign, strict=True)
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise csv.Error(_unread(lines, check.quoted, str(error))) from None
            if cells is None:
                check.end()
                return
            if cells:  # an empty line is no row
                check.see(lines, cells)
                yield cells
            lines.of_row.clear()


def _rows_of_lines(
    opened: Callable[[], TextIO], sign: str, *, may_be_quoted: bool
) -> Iterator[list[str]]:
    """Read each line as a row without quotes, but switch to CSV quoting at the first quoted cell if
    the whole file can be read so.
    """
    rows, inner = 0, f'{sign}"'
    with opened() as text:
        lines = _Lines(text)
        for line in lines:
            lines.of_row.clear()
            if may_be_quoted and (line[0] == '"' or inner in line):
                if _is_quoted(opened, sign):
                    yield from islice(_rows_of_csv(opened, sign), rows, None)
                    return
                may_be_quoted = False
            if content := line.removesuffix("\n").removesuffix("\r"):
                rows += 1
                yield content.split(sign)


def _is_quoted(opened: Callable[[], TextIO], sign: str) -> bool:
    """Whether every cell of the file that begins with a quote also ends with one, as in CSV."""
    try:
        for _ in _rows_of_csv(opened, sign, meant=True):
            pass
    except csv.Error:
        return False
    return True


class _Lines:
    """Iterator over a file's lines that remembers the lines read for the current row."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._read, self._end = iter(text), 0, ""
        self.of_row: list[str] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._text)
        self._end = self._end or line[-1:]
        while self._end == "\n" and line.endswith("\r") and (more := next(self._text, "")):
            line += more
        self._read += 1
        self.of_row.append(line)
        return line

    def number(self, place: int) -> int:
        """Line number in the file, from 1, of the character at offset `place` of the
        current row.
        """
        before = bisect(list(accumulate(map(len, self.of_row))), place)
        return self._read - len(self.of_row) + 1 + before


class _QuoteCheck:
    """Checks the rows of one file, and raises if a quoted cell of several lines may really be
    several rows.

    Lines that have as many cells as the file has columns look like rows, but for prose, where a
    space follows a comma, and indented code. Cells whose first and last line do, or half of many,
    cannot be told from rows between two stray quotes, unless the file quotes all of its texts, or
    has several other cells of lines that are no rows: then a program wrote it that puts line breaks
    into quotes.

    Args:
        sign: between cells.
        meant: whether the lines are meant as cells.
    """

    def __init__(self, sign: str, *, meant: bool) -> None:
        self._sign, self._meant = sign, meant
        edge = re.escape(sign)
        self.quoted = re.compile(rf'(?:\A|(?<={edge}))"(?:((?:[^"]++|"")*+)"(?=[{edge}\r\n]|\Z))?')
        """A cell in quotes, whose text is the group; a quote alone where it does not close."""
        self._columns = self._seen = self._rows = self._spaced = self._cells = 0
        self._bare = False
        """Whether the file has text outside quotes."""
        self._suspects: Counter[bool] = Counter()
        """Number of cells whose lines may be rows, by whether rows have a space after the
        delimiter."""
        self._first: dict[bool, str] = {}
        """Message about the first of these."""

    def see(self, lines: _Lines, cells: Sequence[str]) -> None:
        """Check a row for quoted cells of several lines.

        Raises:
            csv.Error: a cell of several lines makes its row longer or shorter than others.
        """
        self._columns = self._columns or len(cells)
        self._seen += 1
        if len(lines.of_row) == 1 and (self._meant or self._seen > _ROWS_LOOKED_AT):
            return
        row = "".join(lines.of_row)
        others = self.quoted.sub("", row).strip("\r\n").split(self._sign)
        self._bare = self._bare or not all(map(_is_number, others))
        if len(lines.of_row) == 1:
            self._rows += 1
            self._spaced += any(cell[:1] == " " for cell in cells[1:])
            return
        for found in self.quoted.finditer(row):
            further = _LINE_END.split(found[1] or "")
            if len(further) == 1:
                continue
            told = (
                f"line {lines.number(found.start())}: the cell {_shown(found[0])} opens a quote "
                f"that closes {len(further) - 1} lines further on, and "
            )
            if len(cells) != self._columns:
                there = f"the row has {len(cells)} cells in place of {self._columns}"
                raise csv.Error(f"{told}{there}. {_ADVICE}")
            before = self.quoted.sub("", row[: found.start()]).count(self._sign)
            self._look(further, before, told)

    def end(self) -> None:
        """Raise if, after all rows, lines within quotes may really be rows.

        Raises:
            csv.Error: lines within quotes may be rows.
        """
        spaced = self._rows > 0 and self._spaced * _SHARE >= self._rows
        suspects = self._suspects[spaced]
        if self._meant or not self._bare or not suspects:
            return
        if self._cells - suspects < _PROOF * suspects:
            raise csv.Error(self._first[spaced])

    def _look(self, lines: Sequence[str], before: int, told: str) -> None:
        """Count a quoted cell of several lines as suspect if its lines look like rows."""
        self._cells += 1
        full = sum(bool(line.strip()) for line in lines)
        for spaced in (False, True):
            alike = list(self._like_rows(lines, before, spaced=spaced))
            most = 2 * sum(alike) >= max(full, 2 * _ROWS_IN_A_CELL)
            if (alike[0] and alike[-1]) or most:
                self._suspects[spaced] += 1
                there = f"its lines have {self._columns} cells each, as rows have"
                self._first.setdefault(spaced, f"{told}{there}. {_ADVICE}")

    def _like_rows(self, lines: Sequence[str], before: int, *, spaced: bool) -> Iterator[bool]:
        """Yield for each line of a cell whether it looks like a row of the file."""
        last = len(lines) - 1
        for number, line in enumerate(lines):
            cells = line.split(self._sign)
            around = before * (number == 0) + (self._columns - 1 - before) * (number == last)
            begins = cells[1:] if number == 0 else cells  # a line of code is indented
            prose = not spaced and any(cell[:1].isspace() for cell in begins)
            alone = (number == 0 and not cells[0].strip()) or (number == last and not cells[-1])
            yield around + len(cells) == self._columns and not prose and not alone


def _check_names(names: Sequence[str]) -> None:
    if not all(map(is_unicode, names)):
        raise csv.Error(
            "the first line is not UTF-8; set the encoding of the source: latin-1 or cp1252 for "
            "files of older programs, utf-16 for Excel's Unicode text"
        )
    twice = next((name for at, name in enumerate(names) if name and name in names[:at]), None)
    if twice is not None:
        raise csv.Error(
            f"two columns in the first line are named {twice!r}, so one of them would be lost; "
            "rename or remove one"
        )


def _unread(lines: _Lines, quoted: re.Pattern[str], error: str) -> str:
    """Make the message about a row that the parser cannot read, with the line where the unclosed
    quote opens.
    """
    text = "".join(lines.of_row)
    place = next((found.start() for found in quoted.finditer(text) if found[1] is None), None)
    if place is None:
        if "\r" in text.rstrip("\r\n"):
            error = "a carriage return stands in a cell without quotes; write it with QUOTE_ALL"
        return f"line {lines.number(0)}: {error}, or write JSONL or Parquet"
    return (
        f"line {lines.number(place)}: the cell {_shown(text[place:])} opens a quote that does not "
        f"close at the end of a cell ({error}). {_ADVICE}"
    )


def _shown(cell: str) -> str:
    """Quote the beginning of a cell for a message."""
    more = "…" if len(cell) > _SHOWN_CHARACTERS else ""
    return repr((cell[:_SHOWN_CHARACTERS] + more).encode("utf-8", "replace").decode())


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True

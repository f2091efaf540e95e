"""Rows of CSV and TSV files; a file whose quotes can be read in two ways is refused.

Python's csv takes a cell whose quote is never closed to hold the rest of the file, or all rows up
to the next quote. Its strict mode raises where a quote closes within a cell or not at all; a quote
that closes at the end of another cell by chance is known by the lines of the cell (`quote_check`).

TSV as registered knows no quotes: a tab ends a cell, a line ends a row. Programs that write CSV put
them into TSV, too, and are known by all cells of the file that begin with one.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from rayembed.data.sources.cells import is_unicode
from rayembed.data.sources.quote_check import ADVICE, QuoteCheck, shown

NOT_UTF8 = "not UTF-8"

_LARGEST_CELL = 1 << 26
"""Characters of a cell; a longer one comes from a quote that was not closed."""

Cells = tuple[dict[str, Any], str | None]
"""Cells of a row by the names in the first line, None for those that it lacks, and the reason where
it is no row."""


def csv_rows(
    text: TextIO,
    *,
    tsv: bool = False,
    delimiter: str | None = None,
    quotes: str | None = None,
    again: Callable[[], TextIO] | None = None,
) -> Iterator[Cells]:
    """Rows of a file.

    Args:
        text: opened with `newline=""`.
        delimiter: sign between cells; None: a comma, or a tab of TSV.
        quotes: "csv": they stand around cells, also around several lines that look like rows;
            "none": they are signs like any other; None: as in CSV, of TSV what its cells say.
        again: opens the file once more; needed for TSV whose quotes are to be found out.

    Raises:
        csv.Error: two columns have one name, the first line is not UTF-8, a quote does not close at
            the end of its cell, or lines within quotes may be rows; the message has the line where
            it opens.
    """
    sign, lines = delimiter or ("\t" if tsv else ","), _Lines(text)
    plain = quotes == "none" or (tsv and quotes is None)
    judged = tsv and quotes is None and again is not None
    rows = (
        _rows_of_lines(lines, sign, again if judged else None)
        if plain
        else _rows_of_csv(lines, sign, meant=quotes == "csv")
    )
    names = next(rows, None)
    if names is None:
        return
    _check_names(names)
    for cells in rows:
        values: dict[str, Any] = dict(zip(names, cells, strict=False))
        reason = None
        if len(values) < len(names):
            values = {**dict.fromkeys(names), **values}
            if any(sign in cell for cell in cells):
                reason = "fewer cells than columns, one with the delimiter within quotes"
        if further := cells[len(names) :]:
            values["…"], reason = further, "more cells than columns"
        elif not all(map(is_unicode, cells)):
            reason = NOT_UTF8
        elif (
            plain
            and quotes is None
            and '"' in lines.of_row[0]
            and _is_of_csv(cells, lines.next_cells(sign), len(names))
        ):
            reason = "quoted as in CSV, unlike other cells: set source.quotes to csv or none"
        yield values, reason


def _rows_of_csv(
    lines: "_Lines", sign: str, columns: int = 0, *, meant: bool = False
) -> Iterator[list[str]]:
    csv.field_size_limit(_LARGEST_CELL)
    reader = csv.reader(lines, delimiter=sign, strict=True)
    check = QuoteCheck(sign, meant=meant)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise csv.Error(_unread(lines, sign, str(error))) from None
        if cells is None:
            check.end()
            return
        if cells:  # an empty line is no row
            columns = columns or len(cells)
            if len(lines.of_row) > 1 or len(cells) != columns or not check.settled:
                check.see(lines.of_row, cells, columns, lines.first)
            yield cells
        lines.of_row.clear()


def _rows_of_lines(
    lines: "_Lines", sign: str, again: Callable[[], TextIO] | None
) -> Iterator[list[str]]:
    """Rows of one line each; from the first cell that begins with a quote on those of CSV, if the
    whole file can be read so.
    """
    columns, inner = 0, f'{sign}"'
    for line in lines:
        if again is not None and (line[0] == '"' or inner in line):
            if _is_quoted(again, sign):
                lines.put_back()
                yield from _rows_of_csv(lines, sign, columns)
                return
            again = None
        if cells := _cells(line, sign):
            columns = columns or len(cells)
            yield cells
        lines.of_row.clear()


def _is_quoted(again: Callable[[], TextIO], sign: str) -> bool:
    """Whether each cell of a file that begins with a quote ends with one, and is one cell."""
    with again() as text:
        try:
            for _ in _rows_of_csv(_Lines(text), sign, meant=True):
                pass
        except csv.Error:
            return False
    return True


def _cells(line: str, sign: str) -> list[str]:
    content = line.removesuffix("\n").removesuffix("\r")
    return content.split(sign) if content else []


class _Lines:
    """Lines of a file for the parser, which keep those of the row that it is in."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._read, self._end = iter(text), 0, ""
        self._ahead: str | None = None
        self.of_row: list[str] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._line() if self._ahead is None else self._ahead
        self._ahead = None
        self._read += 1
        self.of_row.append(line)
        return line

    def _line(self) -> str:
        line = next(self._text)
        self._end = self._end or line[-1:]
        while self._end == "\n" and line.endswith("\r") and (more := next(self._text, "")):
            line += more
        return line

    def next_cells(self, sign: str) -> list[str]:
        """Cells of the next line of TSV, which stays the next one."""
        if self._ahead is None:
            try:
                self._ahead = self._line()
            except StopIteration:
                return []
        return _cells(self._ahead, sign)

    def put_back(self) -> None:
        """Make the line that was read last the next one."""
        self._ahead = self.of_row.pop()
        self._read -= 1

    @property
    def first(self) -> int:
        """Number in the file, from 1, of the row's first line."""
        return self._read - len(self.of_row) + 1

    def number(self, place: int) -> int:
        """Number in the file, from 1, of the line with this character of the row."""
        for number, line in enumerate(self.of_row, self.first):
            place -= len(line)
            if place < 0:
                return number
        return self._read


def _check_names(names: Sequence[str]) -> None:
    if not all(map(is_unicode, names)):
        raise csv.Error(
            "its first line is not UTF-8; set the source's encoding: latin-1 or cp1252 for files "
            "of older programs, utf-16 for Excel's Unicode text"
        )
    twice = next((name for at, name in enumerate(names) if name and name in names[:at]), None)
    if twice is not None:
        raise csv.Error(
            f"two columns of its first line are named {twice!r}, and one of them would be left "
            "out; rename or remove one"
        )


def _is_of_csv(cells: Sequence[str], following: Sequence[str], columns: int) -> bool:
    """Whether cells of TSV were written with CSV's quotes: around doubled quotes, or around a line
    break, which has cut the row in two.
    """
    within = [cell[1:-1] for cell in cells if len(cell) > 1 and cell[0] == cell[-1] == '"']
    if any('""' in text and '"' not in text.replace('""', "") for text in within):
        return True
    last = cells[-1]
    opens = last.startswith('"') and last.count('"') % 2 == 1
    cut = len(cells) < columns or 0 < len(following) < columns
    return (opens and cut) or (len(cells) < columns and cells[0].endswith('"'))


def _unread(lines: _Lines, sign: str, error: str) -> str:
    """Message of a row that the parser cannot read: where the quote opens that does not close."""
    text = "".join(lines.of_row)
    place = _open_quote(text, sign)
    if place is None:
        if "\r" in text.rstrip("\r\n"):
            error = "a carriage return stands in a cell without quotes; write it with QUOTE_ALL"
        return f"line {lines.number(0)}: {error}, or write JSONL or Parquet"
    return (
        f"line {lines.number(place)}: the cell {shown(text[place:])} opens a quote that does not "
        f"close at the end of a cell ({error}). {ADVICE}"
    )


def _open_quote(text: str, sign: str) -> int | None:
    """Index of the first quote that opens a cell and does not close at the end of it."""
    end = re.escape(sign)
    quoted = rf'"(?:[^"]++|"")*+"(?={end}|[\r\n]|\Z)'
    found = re.match(rf'(?:(?:{quoted}|(?!"))[^{end}]*+{end})*+(?!{quoted})(?=")', text)
    return None if found is None else found.end()

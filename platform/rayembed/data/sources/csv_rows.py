"""Rows of CSV and TSV files; a file whose quotes do not close is refused, not guessed at.

Python's csv takes a cell whose quote is never closed to hold the rest of the file, or all rows up
to the next quote. Its strict mode raises where a quote closes within a cell or not at all; a quote
that closes at the end of another cell by chance is known by the rows that the cell holds.

TSV knows no quotes, as its registered media type has it: a tab ends a cell, a line ends a row.
"""

import csv
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rayembed.data.sources.cells import is_unicode

NOT_UTF8 = "not UTF-8"

_LARGEST_CELL = 1 << 26
"""Characters of a cell; a longer one comes from a quote that was not closed."""

_ROWS_IN_A_CELL = 8
"""Further lines of a row, each with as many cells as the file has columns, from which on they are
taken for rows of their own. Lines of prose or code hardly ever agree so long."""

_SHOWN_CHARACTERS = 40
_ADVICE = (
    "Within a quoted cell a quote is written twice, as csv.writer and pandas' to_csv do it; write "
    "the file so, or as JSONL or Parquet"
)


Cells = tuple[dict[str, Any], str | None]
"""Cells of a row by the names in the first line, None for those that it lacks, and the reason where
it is no row."""


def csv_rows(text: TextIO, *, tsv: bool = False, delimiter: str | None = None) -> Iterator[Cells]:
    """Rows of a file.

    Args:
        text: opened with `newline=""`.
        delimiter: sign between cells; None: a comma, or a tab of TSV.

    Raises:
        csv.Error: two columns have one name, the first line is not UTF-8, or a quote does not close
            at the end of its cell; the message has the line where it opens.
    """
    sign, lines = delimiter or ("\t" if tsv else ","), _Lines(text)
    rows = _rows_of_tsv(lines, sign) if tsv else _rows_of_csv(lines, sign)
    names = next(rows, None)
    if names is None:
        return
    _check_names(names)
    for cells in rows:
        if not tsv and len(lines.of_row) > 1:
            _check_lines(lines, sign, cells, len(names))
        values: dict[str, Any] = dict(zip(names, cells, strict=False))
        if len(values) < len(names):
            values = {**dict.fromkeys(names), **values}
        reason = None
        if further := cells[len(names) :]:
            values["…"], reason = further, "more cells than columns"
        elif not all(map(is_unicode, cells)):
            reason = NOT_UTF8
        elif (
            tsv and '"' in lines.of_row[0] and _is_of_csv(cells, lines.next_cells(sign), len(names))
        ):
            reason = "quoted as in CSV: name the file .csv and set source.delimiter"
        yield values, reason


def _rows_of_csv(lines: "_Lines", sign: str) -> Iterator[list[str]]:
    csv.field_size_limit(_LARGEST_CELL)
    reader = csv.reader(lines, delimiter=sign, strict=True)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise csv.Error(_unread(lines, sign, str(error))) from None
        if cells is None:
            return
        if cells:  # an empty line is no row
            yield cells
        lines.of_row.clear()


def _rows_of_tsv(lines: "_Lines", sign: str) -> Iterator[list[str]]:
    for line in lines:
        if cells := _cells(line, sign):
            yield cells
        lines.of_row.clear()


def _cells(line: str, sign: str) -> list[str]:
    content = line.removesuffix("\n").removesuffix("\r")
    return content.split(sign) if content else []


class _Lines:
    """Lines of a file for the parser, which keep those of the row that it is in.

    X
    """

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

    def number(self, place: int) -> int:
        """Number in the file, from 1, of the line with this character of the row."""
        first = self._read - len(self.of_row) + 1
        for number, line in enumerate(self.of_row, first):
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


def _check_lines(lines: _Lines, sign: str, cells: Sequence[str], columns: int) -> None:
    """Raise where a row of several lines is made of several rows.

    A quote that was left open ends at the next one; where that stands at the end of a cell, the
    parser sees one long cell.
    """
    further = lines.of_row[1:]
    rows = columns > 1 and all(line.count(sign) == columns - 1 for line in further)
    if len(cells) == columns and not (rows and len(further) >= _ROWS_IN_A_CELL):
        return
    cell = next(cell for cell in cells if "\n" in cell or "\r" in cell)
    place = "".join(lines.of_row).find(cell.replace('"', '""').partition("\n")[0])
    seen = (
        f"the row has {len(cells)} cells in place of {columns}"
        if len(cells) != columns
        else f"its lines have {columns} cells each, as rows have"
    )
    raise csv.Error(
        f"line {lines.number(max(place, 0))}: the cell {_shown(cell)} opens a quote that closes "
        f"{len(further)} lines further on, and {seen}. {_ADVICE}"
    )


def _unread(lines: _Lines, sign: str, error: str) -> str:
    """Message of a row that the parser cannot read: where the quote opens that does not close."""
    text = "".join(lines.of_row)
    place = _open_quote(text, sign)
    if place is None:
        if "\r" in text.rstrip("\r\n"):
            error = "a carriage return stands in a cell without quotes; write it with QUOTE_ALL"
        return f"line {lines.number(0)}: {error}, or write JSONL or Parquet"
    return (
        f"line {lines.number(place)}: the cell {_shown(text[place:])} opens a quote that does not "
        f"close at the end of a cell ({error}). {_ADVICE}; where quotes are signs like any other "
        "and no cell has a line break, name the file .tsv and set source.delimiter"
    )


def _open_quote(text: str, sign: str) -> int | None:
    """Index of the first quote that opens a cell and does not close at the end of it."""
    place = 0
    while place < len(text):
        if text[place] == '"':
            opened, place = place, _closing(text, place + 1)
            if place < 0 or text[place + 1 : place + 2] not in ("", sign, "\r", "\n"):
                return opened
        place = text.find(sign, place) + 1
        if not place:
            return None
    return None


def _closing(text: str, place: int) -> int:
    """Index of the next quote that is not doubled; -1 without one."""
    while (place := text.find('"', place)) >= 0 and text[place + 1 : place + 2] == '"':
        place += 2
    return place


def _shown(cell: str) -> str:
    more = "…" if len(cell) > _SHOWN_CHARACTERS else ""
    return repr((cell[:_SHOWN_CHARACTERS] + more).encode("utf-8", "replace").decode())

"""Whether quotes around several lines of CSV hold one cell, or rows between two stray quotes.

    q50,"open                 a cell of two lines, or
    q51,a screen of 12"       two rows with a stray quote each?

Lines that have as many cells as the file has columns, written as its rows are, look like rows: in
prose a space follows a comma, in rows seldom. Where the first and the last line of a cell do, and
half of all, or a quarter of many, the two cannot be told apart, unless the file quotes all of its
texts, or has several other cells of lines that are no rows: then whatever wrote it puts line breaks
into quotes.
"""

import csv
import re
from collections.abc import Iterator, Sequence

ADVICE = (
    "Within a quoted cell a quote is written twice, as csv.writer and pandas' to_csv do it; write "
    "the file so with QUOTE_ALL, or as JSONL or Parquet. For a source of training data: where the "
    "lines are meant as one cell, set source.quotes=csv; where quotes are signs like any other and "
    "no cell has a line break, set source.quotes=none"
)

_ROWS_IN_A_CELL = 4
"""Lines that look like rows, and are most of their cell, from which on they are taken for rows.
Lines of prose or code hardly ever agree so long. A quarter of a cell is enough where its first and
last line are among them, as rows of a file may be ragged."""

_ROWS_LOOKED_AT = 1000
"""First rows of a file, by which it is known how its rows are written."""

_PROOF = 3
"""Cells of several lines that are no rows, for each one whose lines may be rows, from which on the
file is taken to be written by a program that quotes cells with line breaks."""

_SHARE = 20
"""One in so many of them with an empty cell, or one that begins with a space, is the file's way."""

_SHOWN_CHARACTERS = 40
_LINE_END = re.compile(r"\r\n|\n|\r")


class QuoteCheck:
    """Sees the rows of one file, and raises where lines within quotes may be rows.

    Args:
        sign: between cells.
        meant: whether the lines are meant as cells.
    """

    def __init__(self, sign: str, *, meant: bool) -> None:
        self._sign, self._meant = sign, meant
        edge = re.escape(sign) + r"\r\n"
        self._doubled = re.compile(rf'[^{edge}"]""|""[^{edge}"]')
        self._bare = meant
        self.settled = meant
        """Whether it is known how the rows of the file are written."""
        self._seen = self._rows = self._spaced = self._empty = 0
        self._suspects = self._doubtful = self._proper = 0
        self._ragged = False
        self._held: list[_Cell] = []
        """Cells whose lines may be rows, until it is known how the rows are written."""
        self._told = ""
        """Message about the first cell whose lines may be rows, of `_suspects`."""
        self._unlikely = ""
        """That about the first of `_doubtful`, which count in files with rows of other lengths."""

    def see(self, lines: Sequence[str], cells: Sequence[str], columns: int, first: int) -> None:
        """Look at a row; needed where it has several lines or another number of cells than the file
        has columns, and until it is `settled` how its rows are written.

        Args:
            lines: of the row, as they stand in the file.
            first: number of the first of them.

        Raises:
            csv.Error: lines within quotes may be rows.
        """
        self._seen += 1
        if not self.settled and self._seen > _ROWS_LOOKED_AT:
            self.settled = True
            self._judge_held()
        if len(lines) == 1:
            self._ragged = self._ragged or len(cells) != columns
            if not self.settled:
                self._count(lines[0], cells)
            return
        number = first
        for place, (cell, quoted) in enumerate(_forms("".join(lines), cells, self._sign)):
            if not quoted:
                self._bare = self._bare or not _is_number(cell)
                continue
            further = _LINE_END.split(cell)
            if len(further) > 1:
                self._look(_Cell(cell, further, place, columns, number), len(cells))
            number += len(further) - 1

    def end(self) -> None:
        """Judge what only the whole file tells.

        Raises:
            csv.Error: lines within quotes may be rows.
        """
        self._judge_held()
        told = self._told or (self._unlikely if self._ragged else "")
        suspects = self._suspects + (self._doubtful if self._ragged else 0)
        if self._bare and told and self._proper < _PROOF * suspects:
            raise csv.Error(told)

    def _count(self, line: str, cells: Sequence[str]) -> None:
        """Count how a row of one line is written."""
        if '"' in line:
            for cell, quoted in _forms(line, cells, self._sign):
                self._bare = self._bare or (not quoted and not _is_number(cell))
        else:
            self._bare = self._bare or not all(map(_is_number, cells))
            self._rows += 1
            self._spaced += any(cell[:1] == " " for cell in cells[1:])
            self._empty += not all(map(str.strip, cells))

    def _judge_held(self) -> None:
        held, self._held = self._held, []
        for cell in held:
            self._judge(cell)

    def _look(self, cell: "_Cell", cells: int) -> None:
        if cells != cell.columns:
            raise csv.Error(
                f"{cell.told}the row has {cells} cells in place of {cell.columns}. {ADVICE}"
            )
        if self._meant:
            return
        if self._doubled.search(cell.text):  # a quote is written twice, as a writer of CSV does it
            self._proper += 1
        elif self.settled:
            self._judge(cell)
        else:
            self._held.append(cell)

    def _judge(self, cell: "_Cell") -> None:
        like = list(self._like_rows(cell))
        ends = like[0] and like[-1]
        full = [one for one, line in zip(like, cell.lines, strict=True) if line.strip()]
        alike, most = sum(full), 2 * sum(full) >= len(full)
        many = alike >= _ROWS_IN_A_CELL
        told = f"{cell.told}its lines have {cell.columns} cells each, as rows have. {ADVICE}"
        if (most and (ends or many)) or (ends and many and 4 * alike >= len(full)):
            self._suspects += 1
            self._told = self._told or told
        elif ends:
            self._doubtful += 1
            self._unlikely = self._unlikely or told
        else:
            self._proper += 1

    def _like_rows(self, cell: "_Cell") -> Iterator[bool]:
        """Whether each line is written as the file's rows are, with what stands before and behind
        the quotes as part of the first and the last line.
        """
        spaced = self._spaced * _SHARE >= max(self._rows, 1)
        empty = self._empty * _SHARE >= max(self._rows, 1)
        last = len(cell.lines) - 1
        for number, line in enumerate(cell.lines):
            before = cell.place if number == 0 else 0
            behind = cell.columns - 1 - cell.place if number == last else 0
            cells = line.split(self._sign)
            indented = number > 0 and line[:1].isspace() and not spaced  # as code is
            row = before + len(cells) + behind == cell.columns
            row = row and not indented and (spaced or not any(one[:1] == " " for one in cells[1:]))
            row = row and (empty or all(map(str.strip, cells)))
            # A quote alone is no cell.
            row = row and bool(number > 0 or cells[0].strip())
            yield row and bool(number < last or cells[-1].strip())


class _Cell:
    """A cell of several lines.

    Args:
        text: as it stands in the file, without the quotes around it.
        lines: of the text.
        place: of its column, from 0.
        columns: of the file.
        number: line of the file that it begins in.
    """

    def __init__(
        self, text: str, lines: Sequence[str], place: int, columns: int, number: int
    ) -> None:
        self.text, self.lines, self.place, self.columns = text, lines, place, columns
        self.told = (
            f"line {number}: the cell {shown(chr(34) + text)} opens a quote that closes "
            f"{len(lines) - 1} lines further on, and "
        )


def shown(cell: str) -> str:
    """Beginning of a cell for a message."""
    more = "…" if len(cell) > _SHOWN_CHARACTERS else ""
    return repr((cell[:_SHOWN_CHARACTERS] + more).encode("utf-8", "replace").decode())


def _forms(raw: str, cells: Sequence[str], sign: str) -> Iterator[tuple[str, bool]]:
    """Each cell as it stands in the file, without the quotes around it, and whether it has them."""
    place = 0
    for cell in cells:
        inner = cell.replace('"', '""')
        quoted = raw.startswith(f'"{inner}"', place)
        yield inner if quoted else cell, quoted
        place += (len(inner) + 2 if quoted else len(cell)) + len(sign)


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True

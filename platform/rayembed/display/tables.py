"""Tables that rayembed shows in the terminal, as Markdown or as CSV.

A table prints itself on a console of rich; `show` gives it as text. It knows nothing of what it
shows.
"""

import csv
import io
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

MISSING = "–"
"""Placeholder of an unknown number."""

NOISE = "≈"
"""Mark in the terminal before a difference that chance explains."""

NOISE_CAPTION = f"{NOISE}: within noise, as the 95 % interval of the difference includes 0"
"""Line below a table in the terminal with such differences."""

WIDTH = 140
"""Width of the output in columns where it is not a terminal, such as a job's log."""


@dataclass(frozen=True)
class Cell:
    """A number in a table, with its difference from a base value and a mark for the best."""

    value: float | None
    """The number; None or NaN: there is none."""
    difference: float | None = None
    """Difference from the base value; None: not shown."""
    best: bool = False
    """Whether no compared number prints higher."""
    gap: str = MISSING
    """Placeholder of a missing number."""
    digits: int = 3
    """Number of printed decimals."""
    noise: bool = False
    """Whether chance explains the difference; it is then marked so."""

    @property
    def is_missing(self) -> bool:
        """Whether the number is missing."""
        return self.value is None or math.isnan(self.value)

    def text(self, between: str) -> "Text":
        """Format the number for a terminal: the best in bold, a gain in green, a loss in
        red.

        Args:
            between: what stands between the value and the difference.
        """
        from rich.text import Text

        if self.is_missing:
            return Text(self.gap, style="dim")
        shown = Text.assemble((f"{self.value:.{self.digits}f}", "bold" if self.best else ""))
        if self.difference is not None:
            colour = "dim" if self.noise else "green" if self.difference > 0 else "red"
            mark = NOISE if self.noise else ""
            shown.append(f"{between}{mark}{self.difference:+.{self.digits}f}", style=colour)
        return shown

    def markdown(self) -> str:
        """Format the number for Markdown: the best in bold, the difference in brackets."""
        if self.is_missing:
            return self.gap
        value = f"{self.value:.{self.digits}f}"
        bold = f"**{value}**" if self.best else value
        if self.difference is None:
            return bold
        noise = ", within noise" if self.noise else ""
        return f"{bold} ({self.difference:+.{self.digits}f}{noise})"


def best_of(values: Iterable[float | None], digits: int) -> float | None:
    """Highest value after rounding to the printed digits, so that values that print alike share the
    mark.
    """
    known = (value for value in values if value is not None and not math.isnan(value))
    return max((round(value, digits) for value in known), default=None)


@dataclass(frozen=True)
class Table:
    """Table of texts and numbers with column heads, independent of the form of output."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    """Cells of each row; what is no `Cell` is shown as it prints, in CSV numbers in full."""
    title: str = ""
    align: str = "l"
    """`l` or `r` for each column; the last letter holds for all further columns."""
    narrow: Sequence[str] = ()
    """Column heads for the terminal, with line breaks; none: the heads of all forms."""
    look: Literal["boxed", "open", "lined"] = "boxed"
    """Frame in the terminal: all around, between head and rows only, or between all rows."""
    folds: bool = False
    """Whether the terminal may wrap the first column's texts; otherwise they are shown whole."""
    has_head: bool = True
    """Whether the terminal shows the column heads."""
    sections: Collection[int] = ()
    """Numbers of rows that begin a section: bold in the terminal, with a line above."""
    caption: str = ""
    """Line that the terminal shows below the table."""

    def right(self, column: int) -> bool:
        """Whether a column is right-aligned."""
        return self.align[min(column, len(self.align) - 1)] == "r"

    def __rich__(self) -> "rich_table.Table":
        """Convert the table for a console of rich."""
        from rich import table as rich_table
        from rich.box import HEAVY_HEAD, HORIZONTALS
        from rich.text import Text

        boxed = self.look == "boxed"
        made = rich_table.Table(
            title=Text(self.title, "table.title") if self.title else None,
            title_justify="left",
            caption=Text(self.caption, "table.caption") if self.caption else None,
            caption_justify="left",
            box=HEAVY_HEAD if boxed else HORIZONTALS,
            show_header=self.has_head,
            show_lines=self.look == "lined",
            show_edge=boxed,
            pad_edge=boxed,
            padding=(0, 1) if boxed else (0, 1, 0, 0),
        )
        for number, head in enumerate(self.narrow or self.heads):
            whole = number == 0 and not self.folds
            justify: Literal["left", "right"] = "right" if self.right(number) else "left"
            made.add_column(Text(head), justify=justify, no_wrap=whole, overflow="fold")
        between = "\n" if self.look == "lined" else " "
        for number, row in enumerate(self.rows):
            if number in self.sections and number:
                made.add_section()
            cells = [c.text(between) if isinstance(c, Cell) else Text(str(c)) for c in row]
            made.add_row(*cells, style="bold" if number in self.sections else None)
        return made


def facts_table(title: str, facts: Mapping[str, object]) -> Table:
    """Create a table of names and values, without column heads."""
    return Table(["", ""], list(facts.items()), title=title, has_head=False)


def show(table: Table, form: Literal["markdown", "csv"]) -> str:
    """Render the table as text that ends with a line break; CSV has numbers in full precision."""
    if form == "markdown":
        rule = ["---:" if table.right(i) else "---" for i in range(len(table.heads))]
        return "".join(map(_markdown_line, (table.heads, rule, *table.rows)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.heads)
    for row in table.rows:
        writer.writerow([cell.value if isinstance(cell, Cell) else cell for cell in row])
    return text.getvalue()


def _markdown_line(cells: Sequence[object]) -> str:
    shown = [cell.markdown() if isinstance(cell, Cell) else str(cell) for cell in cells]
    return "| " + " | ".join(text.replace("|", "\\|") for text in shown) + " |\n"


def console(out: TextIO | None = None, *, soft_wrap: bool = False) -> "Console":
    """Create a console that prints tables and lines unchanged, in a notebook as plain text.

    Args:
        out: where to print; None: standard output.
        soft_wrap: whether lines that are too long are left to the terminal, never broken.
    """
    from rich.console import Console

    stream = sys.stdout if out is None else out
    return Console(
        file=stream,
        width=None if stream.isatty() else WIDTH,
        highlight=False,
        markup=False,
        soft_wrap=soft_wrap,
        force_jupyter=False,  # else each line would be an output of its own
    )

"""Tables of scores that were taken several times, by other seeds or draws: mean and spread."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.table import Table

from rayembed.evaluation.tables import MISSING, heading, markdown_line

MEAN = "Mean"
"""Heading of the mean over all tasks."""

Scores = Mapping[str, Sequence[float]]
"""Task → its score each time."""


@dataclass(frozen=True)
class SpreadTable:
    """Scores of several rows on several tasks, each taken as often as the row says."""

    rows: Mapping[str, Scores]
    """Label → scores. The i-th score of every task is of the i-th seed or draw."""
    base: str | None = None
    """Label of the row from which gains are taken, seed by seed; None: none are taken."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, in the order in which rows first name them."""
        return tuple(dict.fromkeys(task for scores in self.rows.values() for task in scores))

    @property
    def columns(self) -> tuple[str, ...]:
        """The tasks, and the mean over them where there are several."""
        return (*self.tasks, MEAN) if len(self.tasks) > 1 else self.tasks

    def scores(self, label: str, column: str) -> tuple[float, ...]:
        """Scores of a task, or each time's mean over all tasks; none where a task of them is
        missing.
        """
        row = self.rows.get(label, {})
        if column != MEAN:
            return tuple(row.get(column, ()))
        if any(task not in row for task in self.tasks):
            return ()
        return tuple(fmean(each) for each in zip(*(row[t] for t in self.tasks), strict=True))

    def gains(self, label: str, column: str) -> tuple[float, ...]:
        """Each score less that of the base by the same seed; none where either is missing."""
        if self.base is None or label == self.base:
            return ()
        scores, base = self.scores(label, column), self.scores(self.base, column)
        return tuple(s - b for s, b in zip(scores, base, strict=False))


def shown(scores: Sequence[float], *, signed: bool = False) -> str:
    """`0.712 ± 0.004`: mean and sample standard deviation; a single score stands alone."""
    if not scores or any(math.isnan(score) for score in scores):
        return MISSING
    mean = f"{fmean(scores):+.3f}" if signed else f"{fmean(scores):.3f}"
    return f"{mean} ± {stdev(scores):.3f}" if len(scores) > 1 else mean


def spread_markdown(table: SpreadTable, corner: str) -> str:
    """The table in Markdown, and below it the gains where there is a base.

    Args:
        corner: heading of the labels.
    """
    parts = [_markdown(table, corner, signed=False)]
    if table.base is not None:
        title = f"Gains on {table.base}, each less that of the same seed:"
        parts.append(f"{title}\n\n{_markdown(table, corner, signed=True)}")
    return "\n".join(parts)


def _markdown(table: SpreadTable, corner: str, *, signed: bool) -> str:
    heads = [" ".join(part for part in heading(column) if part) for column in table.columns]
    lines = [markdown_line([corner, *heads]), markdown_line(["---", *["---:"] * len(heads)])]
    for label in table.rows:
        if not (signed and label == table.base):
            lines.append(markdown_line([label, *_cells(table, label, signed=signed)]))
    return "\n".join(lines) + "\n"


def spread_csv(table: SpreadTable, corner: str) -> str:
    """Every single score in full precision: a line for each row, task and time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([corner, "task", "time", "score"])
    for label, row in table.rows.items():
        for task, scores in row.items():
            writer.writerows([label, task, i, score] for i, score in enumerate(scores))
    return text.getvalue()


def spread_table(table: SpreadTable, corner: str, *, title: str) -> Table:
    """The table for a terminal; below a score its gain on the base."""
    made = Table(title=title, title_justify="left")
    made.add_column(corner, no_wrap=True)
    for column in table.columns:
        made.add_column("\n".join(part for part in heading(column) if part), justify="right")
    for label in table.rows:
        cells = _cells(table, label, signed=False)
        if table.base is not None and label != table.base:
            gains = _cells(table, label, signed=True)
            cells = ["\n".join(both) for both in zip(cells, gains, strict=True)]
        made.add_row(label, *cells)
    return made


def _cells(table: SpreadTable, label: str, *, signed: bool) -> list[str]:
    of = table.gains if signed else table.scores
    return [shown(of(label, column), signed=signed) for column in table.columns]

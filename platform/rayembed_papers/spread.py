"""Tabulate repeated scores, over seeds or draws: mean and spread."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rayembed.display.tables import MISSING, Table, show
from rayembed.evaluation.tables import heading
from rayembed_extras.sweeps.seeds import spread

MEAN = "Mean"
"""Heading of the mean over all tasks."""

Scores = Mapping[str, Sequence[float]]
"""Task → its scores over repetitions."""


@dataclass(frozen=True)
class SpreadTable:
    """Scores of several rows on several tasks, each measured several times."""

    rows: Mapping[str, Scores]
    """Label → scores. The i-th score of every task is of the i-th seed or draw."""
    base: str | None = None
    """Label of the row from which gains are computed, seed by seed; None: no gains."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, in the order in which rows first name them."""
        return tuple(dict.fromkeys(task for scores in self.rows.values() for task in scores))

    @property
    def columns(self) -> tuple[str, ...]:
        """The tasks, and the mean over them if there are several."""
        return (*self.tasks, MEAN) if len(self.tasks) > 1 else self.tasks

    def scores(self, label: str, column: str) -> tuple[float, ...]:
        """Return the scores of a task, or each repetition's mean over all tasks; empty if a task is
        missing.
        """
        row = self.rows.get(label, {})
        if column != MEAN:
            return tuple(row.get(column, ()))
        if any(task not in row for task in self.tasks):
            return ()
        return tuple(fmean(each) for each in zip(*(row[t] for t in self.tasks), strict=True))

    def gains(self, label: str, column: str) -> tuple[float, ...]:
        """Subtract the base row's score for the same seed from each score; empty if either is
        missing.
        """
        if self.base is None or label == self.base:
            return ()
        scores, base = self.scores(label, column), self.scores(self.base, column)
        return tuple(s - b for s, b in zip(scores, base, strict=False))


def shown(scores: Sequence[float], *, signed: bool = False) -> str:
    """Format as `0.712 ± 0.004`, mean and sample standard deviation; a single score without
    deviation.
    """
    if not scores or any(math.isnan(score) for score in scores):
        return MISSING
    return spread(scores).text(signed=signed)


def spread_markdown(table: SpreadTable, corner: str) -> str:
    """Format the table of scores in Markdown, followed by the gains if there is a base row.

    Args:
        corner: heading of the labels.
    """
    heads = [corner, *(" ".join(filter(None, heading(column))) for column in table.columns)]
    rows = [[label, *_cells(table, label, signed=False)] for label in table.rows]
    parts = [show(Table(heads, rows, align="lr"), "markdown")]
    if table.base is not None:
        others = [label for label in table.rows if label != table.base]
        gains = [[label, *_cells(table, label, signed=True)] for label in others]
        parts.append(f"Gains on {table.base}, each less that of the same seed:\n")
        parts.append(show(Table(heads, gains, align="lr"), "markdown"))
    return "\n".join(parts)


def spread_csv(table: SpreadTable, corner: str) -> str:
    """Write every single score in full precision as CSV: a line for each row, task and
    repetition.
    """
    rows = [
        [label, task, time, score]
        for label, row in table.rows.items()
        for task, scores in row.items()
        for time, score in enumerate(scores)
    ]
    return show(Table([corner, "task", "time", "score"], rows), "csv")


def spread_table(table: SpreadTable, corner: str, *, title: str) -> Table:
    """Build the score table for a terminal, with each score's gain over the base row below it."""
    rows = []
    for label in table.rows:
        cells = _cells(table, label, signed=False)
        if table.base is not None and label != table.base:
            gains = _cells(table, label, signed=True)
            cells = ["\n".join(both) for both in zip(cells, gains, strict=True)]
        rows.append([label, *cells])
    heads = [corner, *("\n".join(filter(None, heading(column))) for column in table.columns)]
    return Table(heads, rows, title=title, align="lr")


def _cells(table: SpreadTable, label: str, *, signed: bool) -> list[str]:
    of = table.gains if signed else table.scores
    return [shown(of(label, column), signed=signed) for column in table.columns]

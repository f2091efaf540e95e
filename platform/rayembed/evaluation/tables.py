"""Tables of scores: models in rows, tasks in columns, for the terminal, Markdown and CSV."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import HORIZONTALS
from rich.table import Table
from rich.text import Text

MISSING = "–"
"""Stands for a score that was not taken or that a model cannot have."""

_HEADINGS: Mapping[str, tuple[str, str]] = {
    "WikiSentenceRetrieval": ("Sentence retrieval", "nDCG@10"),
    "WikiDescriptionRetrieval": ("Description retrieval", "nDCG@10"),
    "WikiTopicClassification": ("Topic classification", "accuracy"),
    "WikiTopicClustering": ("Topic clustering", "V-measure"),
    "WikiTitleDescriptionPairClassification": ("Title–description pairs", "AP"),
    "WikiRelatednessSTS": ("Relatedness", "Spearman"),
    "WikiCrossLingualRetrieval": ("Cross-lingual retrieval", "nDCG@10"),
}

_NARROW: Mapping[str, tuple[str, str]] = {
    "WikiSentenceRetrieval": ("Sentence\nretrieval", "nDCG@10"),
    "WikiDescriptionRetrieval": ("Descript.\nretrieval", "nDCG@10"),
    "WikiTopicClassification": ("Topic\nclassif.", "accuracy"),
    "WikiTopicClustering": ("Topic\nclusters", "V-meas."),
    "WikiTitleDescriptionPairClassification": ("Title\npairs", "AP"),
    "WikiRelatednessSTS": ("Related-\nness", "Spearman"),
    "WikiCrossLingualRetrieval": ("Cross-\nlingual", "nDCG@10"),
}
"""Headings for the terminal, where six of them share a line."""


@dataclass(frozen=True)
class ScoreKey:
    """Model of a run whose scores are taken."""

    stage: str | None = None
    """Name of the stage whose model it is; None: the untrained model, or a baseline."""
    baseline: str | None = None
    """Name of another model."""
    dimension: int | None = None
    """Number of first values of each vector (Matryoshka); None: all."""
    without_context: bool = False
    """Whether a contextual model embeds behind its null token."""

    def label(self, stages: Sequence[str]) -> str:
        """Label for readers.

        Args:
            stages: names of all stages of the run, in their order.
        """
        if self.dimension is not None:
            return f"the same, {self.dimension} dimensions"
        if self.without_context:
            return "the same, without context"
        if self.baseline is not None:
            return self.baseline
        if self.stage is None:
            return "untrained"
        return f"stage {stages.index(self.stage) + 1}: {self.stage}"


UNTRAINED = ScoreKey()

RunScores = Mapping[ScoreKey, Mapping[str, float]]
"""Model → task name → main score, of one run."""


@dataclass(frozen=True)
class Cell:
    """One score of a table as a reader sees it."""

    score: float | None
    """None: there is none."""
    difference: float | None = None
    """Score less that of the base; None: not shown."""
    best: bool = False
    """Whether none of the table's scores beside it prints higher."""
    gap: str = MISSING
    """Placeholder of a missing score."""
    digits: int = 3
    """Decimals that are printed."""

    def text(self, between: str = "\n") -> Text:
        """For a terminal: the best in bold, a gain in green, a loss in red."""
        if self.score is None:
            return Text(self.gap, style="dim")
        shown = Text.assemble((f"{self.score:.{self.digits}f}", "bold" if self.best else ""))
        if self.difference is not None:
            colour = "green" if self.difference > 0 else "red"
            shown.append(f"{between}{self.difference:+.{self.digits}f}", style=colour)
        return shown

    def markdown(self) -> str:
        """For Markdown: the best in bold, the difference in brackets."""
        if self.score is None:
            return self.gap
        score = f"{self.score:.{self.digits}f}"
        bold = f"**{score}**" if self.best else score
        if self.difference is None:
            return bold
        return f"{bold} ({self.difference:+.{self.digits}f})"


def best_of(scores: Iterable[float | None], digits: int) -> float | None:
    """The highest score as it is printed, so that scores that print alike are all the best."""
    known = (score for score in scores if score is not None)
    return max((round(score, digits) for score in known), default=None)


@dataclass(frozen=True)
class ScoreTable:
    """Scores of several models on several tasks."""

    rows: Mapping[str, Mapping[str, float]]
    """Model label → task name → main score; a missing task has no score."""
    base: str | None = None
    """Label of the row from which differences are taken; None: none are shown."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, in the order in which rows first name them."""
        return tuple(dict.fromkeys(task for scores in self.rows.values() for task in scores))

    def score(self, label: str, task: str) -> float | None:
        """The score; None where there is none or it is not a number (a collapsed model)."""
        score = self.rows.get(label, {}).get(task)
        return None if score is None or math.isnan(score) else score

    def best(self, task: str) -> float | None:
        """The highest score of a task as it is printed, with three decimals; None without one."""
        return best_of((self.score(label, task) for label in self.rows), 3)

    def cell(self, label: str, task: str) -> Cell:
        """Cell of a model and a task."""
        score = self.score(label, task)
        best = score is not None and round(score, 3) == self.best(task)
        return Cell(score, self.difference(label, task), best)

    def mean(self, label: str) -> float | None:
        """Mean over all tasks of a row; None where a task is missing."""
        scores = [self.score(label, task) for task in self.tasks]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known and len(known) == len(scores) else None

    def difference(self, label: str, task: str) -> float | None:
        """Score less the base's score; None for the base itself and where either is missing."""
        if self.base is None or label == self.base:
            return None
        score, base = self.score(label, task), self.score(self.base, task)
        return None if score is None or base is None else score - base


def run_table(scores: RunScores, stages: Sequence[str]) -> ScoreTable:
    """The table of a run, with differences from the untrained model."""
    rows = {key.label(stages): tasks for key, tasks in scores.items()}
    return ScoreTable(rows, UNTRAINED.label(stages) if UNTRAINED in scores else None)


def heading(task: str) -> tuple[str, str]:
    """Readable name of a task and of its main score."""
    return _HEADINGS.get(task, (task, ""))


def rich_table(table: ScoreTable, *, title: str = "Held-out scores") -> Table:
    """The table for a terminal: the best score of a task in bold, under it the gain on the base.

    Five models on the six tasks of the Wikipedia sample fit into 80 columns.
    """
    shown = Table(
        title=title,
        title_justify="left",
        box=HORIZONTALS,
        show_lines=True,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("Model", overflow="fold")
    for task in table.tasks:
        words, metric = _NARROW.get(task, heading(task))
        shown.add_column(f"{words}\n{metric}".strip(), justify="right")
    shown.add_column("Mean", justify="right")
    means = {label: table.mean(label) for label in table.rows}
    best = best_of(means.values(), 3)
    for label in means:
        cells = [table.cell(label, task).text() for task in table.tasks]
        cells.append(_mean(table, means, label, best).text())
        shown.add_row(label, *cells)
    return shown


def _mean(
    table: ScoreTable, means: Mapping[str, float | None], label: str, best: float | None
) -> Cell:
    mean = means[label]
    base = means.get(table.base) if table.base is not None else None
    if mean is None or base is None or label == table.base:
        return Cell(mean, None, mean is not None and round(mean, 3) == best)
    return Cell(mean, mean - base, round(mean, 3) == best)


def markdown_table(table: ScoreTable) -> str:
    """The table in Markdown, the best score of a task in bold, differences in brackets."""
    heads = [" ".join(part for part in heading(task) if part) for task in table.tasks]
    lines = [markdown_line(["Model", *heads]), markdown_line(["---", *["---:"] * len(heads)])]
    for label in table.rows:
        cells = [table.cell(label, task).markdown() for task in table.tasks]
        lines.append(markdown_line([label, *cells]))
    return "\n".join(lines) + "\n"


def csv_table(table: ScoreTable) -> str:
    """The table as CSV in full precision, one row a model; missing scores are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", *table.tasks])
    for label, scores in table.rows.items():
        writer.writerow([label, *(scores.get(task, "") for task in table.tasks)])
    return text.getvalue()


def markdown_line(cells: Sequence[str]) -> str:
    """One line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

"""Tables of scores: models in rows, tasks in columns, for the terminal, Markdown and CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
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
}

_NARROW: Mapping[str, tuple[str, str]] = {
    "WikiSentenceRetrieval": ("Sentence\nretrieval", "nDCG@10"),
    "WikiDescriptionRetrieval": ("Descript.\nretrieval", "nDCG@10"),
    "WikiTopicClassification": ("Topic\nclassif.", "accuracy"),
    "WikiTopicClustering": ("Topic\nclusters", "V-meas."),
    "WikiTitleDescriptionPairClassification": ("Title\npairs", "AP"),
    "WikiRelatednessSTS": ("Related-\nness", "Spearman"),
}
"""Headings for the terminal, where six of them share a line."""


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
        scores = [self.score(label, task) for label in self.rows]
        return max((round(score, 3) for score in scores if score is not None), default=None)

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


def heading(task: str) -> tuple[str, str]:
    """Readable name of a task and of its main score."""
    return _HEADINGS.get(task, (task, ""))


def rich_table(table: ScoreTable, *, title: str = "Held-out scores") -> Table:
    """The table for a terminal: the best score of a task in bold, under it the gain on the base.

    Five models on the six tasks of the Wikipedia suite fit into 80 columns.
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
    best_mean = max((round(mean, 3) for mean in means.values() if mean is not None), default=None)
    base_mean = means.get(table.base) if table.base is not None else None
    for label in table.rows:
        cells = [
            _cell(table.score(label, task), table.best(task), table.difference(label, task))
            for task in table.tasks
        ]
        mean = means[label]
        gain = None
        if mean is not None and base_mean is not None and label != table.base:
            gain = mean - base_mean
        cells.append(_cell(mean, best_mean, gain))
        shown.add_row(label, *cells)
    return shown


def _cell(score: float | None, best: float | None, difference: float | None) -> Text:
    if score is None:
        return Text(MISSING, style="dim")
    cell = Text.assemble((f"{score:.3f}", "bold" if round(score, 3) == best else ""))
    if difference is not None:
        cell.append(f"\n{difference:+.3f}", style="green" if difference > 0 else "red")
    return cell


def markdown_table(table: ScoreTable) -> str:
    """The table in Markdown, the best score of a task in bold, differences in brackets."""
    heads = [" ".join(part for part in heading(task) if part) for task in table.tasks]
    lines = [_line(["Model", *heads]), _line(["---", *["---:"] * len(heads)])]
    for label in table.rows:
        cells = [label]
        for task in table.tasks:
            score, difference = table.score(label, task), table.difference(label, task)
            if score is None:
                cells.append(MISSING)
                continue
            text = f"**{score:.3f}**" if round(score, 3) == table.best(task) else f"{score:.3f}"
            cells.append(text if difference is None else f"{text} ({difference:+.3f})")
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def csv_table(table: ScoreTable) -> str:
    """The table as CSV in full precision, one row a model; missing scores are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", *table.tasks])
    for label, scores in table.rows.items():
        writer.writerow([label, *(scores.get(task, "") for task in table.tasks)])
    return text.getvalue()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

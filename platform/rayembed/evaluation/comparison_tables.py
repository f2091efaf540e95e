"""Tables of a comparison: by category and by task, for the terminal, Markdown and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table
from rich.text import Text

from rayembed.evaluation.benchmark_lines import MEAN, MEAN_OF_16, Line
from rayembed.evaluation.comparison import Column, Comparison, value
from rayembed.evaluation.tables import MISSING, Cell, best_of, markdown_line

DIGITS = 2
"""Decimals, as the papers print them."""

MODELS_A_TABLE = 5
"""Models side by side in the terminal's table of tasks: with the longest name of a task of
`MTEB(eng, v1)` they fill 120 columns."""

_SHORT: Mapping[str, str] = {
    "PairClassification": "Pair\nclassif.",
    "Classification": "Classi-\nfication",
    "Summarization": "Summari-\nzation",
    MEAN_OF_16: f"\n{MEAN}",
}
"""Names of categories for the terminal."""

_METRICS: Mapping[str, str] = {
    "ndcg_at_10": "nDCG@10",
    "map_at_1000": "MAP",
    "max_over_subqueries_map_at_1000": "MAP",
    "v_measure": "V-measure",
    "max_ap": "AP",
    "accuracy": "accuracy",
    "cosine_spearman": "Spearman",
}
"""mteb's names of main scores → how the papers call them; others are shown as they are."""


_CSV_COLUMNS = (
    *("model", "name", "published", "level", "category", "task", "metric"),
    *("score", "difference", "baseline"),
    *("source", "dataset_revision", "mteb_version", "date"),
)


def metric_of(lines: Sequence[Line]) -> str:
    """The main score of several tasks as the papers call it; empty where they have several."""
    metrics = {_METRICS.get(line.metric, line.metric) for line in lines}
    return metrics.pop() if len(metrics) == 1 else ""


def category_table(comparison: Comparison) -> Table:
    """Models in rows, categories in columns, under a score its difference from the baseline.

    An average that is not complete shows how many of its tasks are scored.
    """
    shown = _table(f"{comparison.benchmark}, by category", show_lines=True)
    shown.add_column("\n\n\nModel", overflow="fold", min_width=20)
    names = comparison.averages
    for name, lines in names.items():
        heads = (_SHORT.get(name, f"\n{name}"), metric_of(lines), f"({len(lines)})")
        shown.add_column("\n".join(heads), justify="right")
    for column in comparison.columns:
        cells = [_average(comparison, column, name).text() for name in names]
        shown.add_row(Text(_row_label(comparison, column)), *cells)
    return shown


def task_tables(comparison: Comparison) -> list[Table]:
    """Tasks in rows and models in columns, below each category's average; several tables where
    there are more models than fit, each with the baseline.
    """
    return [_task_table(comparison, columns) for columns in _side_by_side(comparison)]


def comparison_markdown(comparison: Comparison) -> str:
    """The tables by category and by task in Markdown, with the notes below."""
    names = comparison.averages
    heads = [f"{name} ({len(lines)})" for name, lines in names.items()]
    text = [f"# {comparison.benchmark}", "", _about(comparison), ""]
    text += [markdown_line(["Model", *heads]), markdown_line(["---", *["---:"] * len(heads)])]
    for column in comparison.columns:
        cells = [_average(comparison, column, name).markdown() for name in names]
        text.append(markdown_line([_row_label(comparison, column), *cells]))
    text += ["", "## Tasks", ""]
    labels = [_row_label(comparison, column) for column in comparison.columns]
    text += [
        markdown_line(["Task", "Score", *labels]),
        markdown_line(["---", "---", *["---:"] * len(labels)]),
    ]
    for name, lines in comparison.categories.items():
        cells = [_heading_cell(comparison, c, name).markdown() for c in comparison.columns]
        text.append(markdown_line([f"**{name} ({len(lines)})**", "", *cells]))
        for line in lines:
            cells = [_score(comparison, c, line.name).markdown() for c in comparison.columns]
            text.append(markdown_line([line.name, metric_of([line]), *cells]))
    notes = [note for column in comparison.columns for note in column.notes]
    if notes:
        text += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(text) + "\n"


def comparison_csv(comparison: Comparison) -> str:
    """One row for each score and average of each model, with where it comes from.

    Columns: model (label), name, published (true, false), level (task, category, benchmark),
    category (or which mean), task, metric, score (percent, full precision), difference (from the
    baseline), baseline, source, dataset_revision, mteb_version, date.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for column in comparison.columns:
        for category, lines in comparison.categories.items():
            for line in lines:
                place = ("task", category, line.name, metric_of([line]))
                _write_row(writer, comparison, column, line.name, place)
        for name, lines in comparison.averages.items():
            level = "benchmark" if name in (MEAN, MEAN_OF_16) else "category"
            _write_row(writer, comparison, column, name, (level, name, "", metric_of(lines)))
    return text.getvalue()


def _write_row(
    writer: Any,
    comparison: Comparison,
    column: Column,
    name: str,
    place: tuple[str, str, str, str],
) -> None:
    score = value(column, name)
    if score is None:
        return
    difference = comparison.difference(column, name)
    origin = column.origins.get(name)
    writer.writerow(
        [
            column.label,
            column.name,
            str(column.published).lower(),
            *place,
            score,
            "" if difference is None else difference,
            comparison.baseline or "",
            "mean of the tasks" if origin is None else origin.source,
            "" if origin is None else " ".join(origin.dataset_revisions),
            "" if origin is None else " ".join(origin.mteb_versions),
            "" if origin is None else origin.date,
        ]
    )


def _task_table(comparison: Comparison, columns: Sequence[Column]) -> Table:
    shown = _table(f"{comparison.benchmark}, by task", show_lines=False)
    shown.add_column("Task", no_wrap=True)
    for column in columns:
        shown.add_column(Text(_row_label(comparison, column)), justify="right", overflow="fold")
    for number, (name, lines) in enumerate(comparison.categories.items()):
        if number:
            shown.add_section()
        head = f"{name} ({len(lines)}) {metric_of(lines)}".strip()
        cells = [_heading_cell(comparison, column, name).text(" ") for column in columns]
        shown.add_row(head, *cells, style="bold")
        for line in lines:
            cells = [_score(comparison, column, line.name).text(" ") for column in columns]
            shown.add_row(f" {line.name}", *cells)
    return shown


def _side_by_side(comparison: Comparison) -> list[tuple[Column, ...]]:
    """The models of each table of the terminal, the baseline in each."""
    base = [column for column in comparison.columns if column is comparison.base]
    others = [column for column in comparison.columns if column is not comparison.base]
    if len(comparison.columns) <= MODELS_A_TABLE:
        return [comparison.columns]
    size = MODELS_A_TABLE - len(base)
    return [(*base, *others[i : i + size]) for i in range(0, len(others), size)]


def _heading_cell(comparison: Comparison, column: Column, category: str) -> Cell:
    """Average beside a category's name, above its lines."""
    return _average(comparison, column, category if category in comparison.averages else MEAN)


def _average(comparison: Comparison, column: Column, name: str) -> Cell:
    lines = comparison.averages.get(name, ())
    scored = comparison.scored(column, lines)
    begun = not column.published and scored < len(lines)
    gap = f"{scored} of {len(lines)}" if begun else MISSING
    score = column.averages.get(name)
    best = best_of((other.averages.get(name) for other in comparison.columns), DIGITS)
    return _cell(score, comparison.difference(column, name), best, gap)


def _score(comparison: Comparison, column: Column, name: str) -> Cell:
    score = column.scores.get(name)
    best = best_of((other.scores.get(name) for other in comparison.columns), DIGITS)
    return _cell(score, comparison.difference(column, name), best, MISSING)


def _cell(score: float | None, difference: float | None, best: float | None, gap: str) -> Cell:
    is_best = score is not None and round(score, DIGITS) == best
    return Cell(score, difference, is_best, gap, DIGITS)


def _row_label(comparison: Comparison, column: Column) -> str:
    marks = ["paper"] if column.published else []
    marks += ["baseline"] if column is comparison.base else []
    return f"{column.label} [{', '.join(marks)}]" if marks else column.label


def _about(comparison: Comparison) -> str:
    less = f" In brackets: less {comparison.baseline}." if comparison.baseline else ""
    return (
        f"Main scores times 100, {len(comparison.lines)} tasks; the best of a line is bold; an "
        f"average over tasks of which some are not scored shows how many are.{less}"
    )


def _table(title: str, *, show_lines: bool) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=HORIZONTALS,
        show_lines=show_lines,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )

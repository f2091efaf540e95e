"""Tables of a comparison: by category and by task, for the terminal, Markdown and CSV."""

from collections.abc import Mapping, Sequence

from rayembed.display.tables import MISSING, NOISE_CAPTION, Cell, Table, best_of, show
from rayembed.evaluation.averages import MEAN_OF_16
from rayembed.results.costs import cost_columns
from rayembed.results.intervals import PairedDifference
from rayembed_extras.comparison.benchmark_lines import MEAN, Line
from rayembed_extras.comparison.compare import Column, ModelComparison, value

DIGITS = 2
"""Number of decimals, as in the papers."""

MODELS_A_TABLE = 5
"""Models in one terminal table of tasks; with the longest task name of `MTEB(eng, v1)` they fill
120 columns."""

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
"""mteb's names of main scores → the papers' names; others keep mteb's name."""


_NARROW_COSTS = {
    "Documents/s": "Docs\n/s",
    "Bytes/document": "Bytes\n/doc",
    "Price of 1M": "Price\nof 1M",
}
"""Headings of costs for the terminal."""

_CSV_COLUMNS = (
    *("model", "name", "published", "level", "category", "task", "metric"),
    *("score", "difference", "low", "high", "baseline"),
    *("source", "dataset_revision", "mteb_version", "date"),
)


def metric_of(lines: Sequence[Line]) -> str:
    """Return the papers' name of the main score if all given tasks share one; otherwise empty."""
    metrics = {_METRICS.get(line.metric, line.metric) for line in lines}
    return metrics.pop() if len(metrics) == 1 else ""


def category_table(comparison: ModelComparison) -> Table:
    """Tabulate models in rows and categories in columns, with the difference from the
    baseline.

    An average that is not complete shows how many of its tasks are scored.
    """
    names = comparison.averages
    narrow = [
        "\n".join((_SHORT.get(name, f"\n{name}"), metric_of(lines), f"({len(lines)})"))
        for name, lines in names.items()
    ]
    costs = cost_columns([column.cost for column in comparison.columns])
    rows: list[list[object]] = [
        [_row_label(comparison, column), *(_average(comparison, column, n) for n in names)]
        for column in comparison.columns
    ]
    for number, row in enumerate(rows):
        row += [texts[number] or MISSING for texts in costs.values()]
    has_noise = any(isinstance(cell, Cell) and cell.noise for row in rows for cell in row)
    return Table(
        ["Model", *(f"{name} ({len(lines)})" for name, lines in names.items()), *costs],
        rows,
        title=f"{comparison.benchmark}, by category",
        align="lr",
        narrow=["\n\n\nModel", *narrow, *("\n\n" + _NARROW_COSTS[head] for head in costs)],
        look="lined",
        folds=True,
        caption=NOISE_CAPTION if has_noise else "",
    )


def difference_table(comparison: ModelComparison, *, tasks: bool = True) -> Table | None:
    """Tabulate differences from the baseline with 95 % intervals, a row for each model and
    average.

    None where no difference has an interval.

    Args:
        tasks: whether each task has a row as well.
    """
    names = list(comparison.averages)
    if tasks or not names:
        names += [line.name for lines in comparison.categories.values() for line in lines]
    rows = [
        [column.label, name, apart.shown(DIGITS)]
        for column in comparison.columns
        for name in dict.fromkeys(names)
        if (apart := comparison.paired(column, name))
    ]
    known = any(
        (apart := comparison.paired(column, name)) and apart.interval is not None
        for column in comparison.columns
        for name in names
    )
    title = f"Less {comparison.baseline}"
    return Table(["Model", "Task", "Difference"], rows, title=title) if known else None


def task_tables(comparison: ModelComparison) -> list[Table]:
    """Tabulate tasks in rows, below their category's average, and models in columns; split into
    several tables, each with the baseline, if the models do not fit.
    """
    return [_task_table(comparison, columns) for columns in _side_by_side(comparison)]


def comparison_markdown(comparison: ModelComparison) -> str:
    """Format the tables by category and by task in Markdown, followed by the notes."""
    text = [f"# {comparison.benchmark}", "", _about(comparison), ""]
    text.append(show(category_table(comparison), "markdown"))
    text += ["## Tasks", "", show(_tasks_for_markdown(comparison), "markdown")]
    if (apart := difference_table(comparison)) is not None:
        text += [f"## Less {comparison.baseline}", "", show(apart, "markdown")]
    if comparison.notes:
        text += ["## Notes", "", *(f"- {note}" for note in comparison.notes), ""]
    return "\n".join(text)


def _tasks_for_markdown(comparison: ModelComparison) -> Table:
    rows: list[list[object]] = []
    columns = comparison.columns
    for name, lines in comparison.categories.items():
        averages = [_heading_cell(comparison, column, name) for column in columns]
        rows.append([f"**{name} ({len(lines)})**", "", *averages])
        for line in lines:
            cells = [_score(comparison, column, line.name) for column in columns]
            rows.append([line.name, metric_of([line]), *cells])
    labels = [_row_label(comparison, column) for column in columns]
    return Table(["Task", "Score", *labels], rows, align="llr")


def comparison_csv(comparison: ModelComparison) -> str:
    """Format the comparison as CSV, with a row for each score and average of each model, and its
    origin.

    Columns: model (label), name, published (true, false), level (task, category, benchmark),
    category (or which mean), task, metric, score (percent, full precision), difference (from the
    baseline), low and high (its 95 % interval), baseline, source, dataset_revision, mteb_version,
    date.
    """
    rows = []
    for column in comparison.columns:
        for category, lines in comparison.categories.items():
            for line in lines:
                place = ("task", category, line.name, metric_of([line]))
                rows += _csv_row(comparison, column, line.name, place)
        for name, lines in comparison.averages.items():
            level = "benchmark" if name in (MEAN, MEAN_OF_16) else "category"
            rows += _csv_row(comparison, column, name, (level, name, "", metric_of(lines)))
    return show(Table(_CSV_COLUMNS, rows), "csv")


def _csv_row(
    comparison: ModelComparison, column: Column, name: str, place: tuple[str, str, str, str]
) -> list[list[object]]:
    """Return one CSV row, or none if the model has no score of this name."""
    score = value(column, name)
    if score is None:
        return []
    apart = comparison.paired(column, name)
    low, high = (apart and apart.interval) or ("", "")
    origin = column.origins.get(name)
    row: list[object] = [
        column.label,
        column.name,
        str(column.published).lower(),
        *place,
        score,
        "" if apart is None else apart.mean,
        low,
        high,
        comparison.baseline or "",
        "mean of the tasks" if origin is None else origin.source,
        "" if origin is None else " ".join(origin.dataset_revisions),
        "" if origin is None else " ".join(origin.mteb_versions),
        "" if origin is None else origin.date,
    ]
    return [row]


def _task_table(comparison: ModelComparison, columns: Sequence[Column]) -> Table:
    rows: list[list[object]] = []
    sections = []
    for name, lines in comparison.categories.items():
        sections.append(len(rows))
        head = f"{name} ({len(lines)}) {metric_of(lines)}".strip()
        rows.append([head, *(_heading_cell(comparison, column, name) for column in columns)])
        rows += [
            [f" {line.name}", *(_score(comparison, column, line.name) for column in columns)]
            for line in lines
        ]
    return Table(
        ["Task", *(_row_label(comparison, column) for column in columns)],
        rows,
        title=f"{comparison.benchmark}, by task",
        align="lr",
        look="open",
        sections=sections,
    )


def _side_by_side(comparison: ModelComparison) -> list[tuple[Column, ...]]:
    """Divide the models among terminal tables that fit the width; each includes the baseline."""
    base = [column for column in comparison.columns if column is comparison.base]
    others = [column for column in comparison.columns if column is not comparison.base]
    if len(comparison.columns) <= MODELS_A_TABLE:
        return [comparison.columns]
    size = MODELS_A_TABLE - len(base)
    return [(*base, *others[i : i + size]) for i in range(0, len(others), size)]


def _heading_cell(comparison: ModelComparison, column: Column, category: str) -> Cell:
    """Return the cell of an average in a category's heading row, above the category's tasks."""
    return _average(comparison, column, category if category in comparison.averages else MEAN)


def _average(comparison: ModelComparison, column: Column, name: str) -> Cell:
    lines = comparison.averages.get(name, ())
    scored = comparison.scored(column, lines)
    begun = not column.published and scored < len(lines)
    gap = f"{scored} of {len(lines)}" if begun else MISSING
    score = column.averages.get(name)
    best = best_of((other.averages.get(name) for other in comparison.columns), DIGITS)
    return _cell(score, comparison.paired(column, name), best, gap)


def _score(comparison: ModelComparison, column: Column, name: str) -> Cell:
    score = column.scores.get(name)
    best = best_of((other.scores.get(name) for other in comparison.columns), DIGITS)
    return _cell(score, comparison.paired(column, name), best, MISSING)


def _cell(
    score: float | None, apart: PairedDifference | None, best: float | None, gap: str
) -> Cell:
    is_best = score is not None and round(score, DIGITS) == best
    difference, noise = (None, False) if apart is None else (apart.mean, apart.is_noise)
    return Cell(score, difference, is_best, gap, DIGITS, noise)


def _row_label(comparison: ModelComparison, column: Column) -> str:
    marks = ["paper"] if column.published else []
    marks += ["baseline"] if column is comparison.base else []
    return f"{column.label} [{', '.join(marks)}]" if marks else column.label


def _about(comparison: ModelComparison) -> str:
    less = f" In brackets: less {comparison.baseline}." if comparison.baseline else ""
    less += " Documents a second are those of one worker." if _has_costs(comparison) else ""
    return (
        f"Main scores times 100, {len(comparison.lines)} tasks; the best of a line is bold; an "
        f"average over tasks of which some are not scored shows how many are.{less}"
    )


def _has_costs(comparison: ModelComparison) -> bool:
    return any(column.cost.documents_per_second for column in comparison.columns)

"""Compare a backbone's scores with the paper's tables, as Markdown and CSV."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median

from rayembed.display.tables import Table, show
from rayembed_papers.backbone.results import Summary
from rayembed_papers.printed import rows_of


@dataclass(frozen=True)
class PrintedScore:
    """A score printed in one cell of the paper's tables."""

    table: str
    model: str
    """The row's label."""
    benchmark: str
    task: str
    """rayembed's name of the task; empty: the average."""
    metric: str
    """Metric as printed in the table; empty if there is none."""
    score: float
    """Score in percent."""


@cache
def printed() -> tuple[PrintedScore, ...]:
    """Read all scores of the paper's tables, in their order."""
    return tuple(
        PrintedScore(**{**line, "score": float(line["score"])})  # type: ignore[arg-type]
        for line in rows_of(__package__, "published")
    )


def printed_models(benchmark: str) -> tuple[str, ...]:
    """Row labels of a benchmark's table in the paper."""
    return tuple(dict.fromkeys(cell.model for cell in printed() if cell.benchmark == benchmark))


def printed_score(model: str, benchmark: str, task: str) -> float:
    """Look up the paper's score in percent; the table's average if `task` is empty."""
    (cell,) = (c for c in printed() if (c.model, c.benchmark, c.task) == (model, benchmark, task))
    return cell.score


_TITLES = {
    "glue": "GLUE, development sets (beside Table 3 of Nomic Embed v2)",
    "xtreme-r": "XTREME-R, mean over languages (beside Table 4 of Nomic Embed v2)",
}

_MEAN = "Mean of these"


def comparison(benchmark: str, summaries: Sequence[Summary], name: str) -> Table:
    """Tabulate scores in percent: the paper's models, then the backbone's best setting (median over
    seeds) and the median of all trials. The last column is the mean of the tasks shown, for the
    paper's rows too.
    """
    tasks = [summary.task.name for summary in summaries]
    rows = [
        [f"{model} (paper)", *_cells([printed_score(model, benchmark, task) for task in tasks])]
        for model in printed_models(benchmark)
    ]
    best = [100 * summary.median for summary in summaries]
    every = [100 * summary.median_of_all for summary in summaries]
    rows.append([f"{name}, best setting", *_cells(best)])
    if every != best:
        rows.append([f"{name}, median of all trials", *_cells(every)])
    return Table(["Model", *tasks, _MEAN], rows, align="lr")


def settings_table(summaries: Sequence[Summary]) -> Table:
    """Tabulate each task's best setting, with metric, median, mean, standard deviation and number
    of trials.
    """
    header = ["Task", "Metric", "Rate", "Batch", "Median", "Mean", "Deviation", "Trials"]
    rows = []
    for summary in summaries:
        rate, batch = summary.setting
        values = [100 * v for v in (summary.median, summary.mean, summary.deviation)]
        shown = [f"{value:.2f}" for value in values]
        numbers = [f"{len(summary.best)} of {len(summary.results)}"]
        rows.append(
            [summary.task.name, summary.task.metric, f"{rate:g}", str(batch), *shown, *numbers]
        )
    return Table(header, rows, align="lr")


def markdown(benchmark: str, summaries: Sequence[Summary], name: str) -> str:
    """Write scores and best settings as Markdown, under a title."""
    parts = [f"## {_TITLES[benchmark]}\n", show(comparison(benchmark, summaries, name), "markdown")]
    parts += ["Best settings:\n", show(settings_table(summaries), "markdown")]
    diverged = [
        f"{one.task.name} {one.diverged} of {one.diverged + len(one.results)}"
        for one in summaries
        if one.diverged
    ]
    if diverged:
        parts.append(f"Trials that diverged, and are no results: {', '.join(diverged)}.\n")
    return "\n".join(parts)


def scores_csv(summaries: Sequence[Summary]) -> str:
    """Write a CSV with a line for each task, subset and metric: scores of the best setting's seeds,
    from -1 to 1.
    """
    rows = []
    for summary in summaries:
        task = summary.task
        first = summary.best[0].scores[task.name]
        for subset, metrics in first.items():
            for metric in metrics:
                values = [result.scores[task.name][subset][metric] for result in summary.best]
                numbers = [f"{median(values):.6f}", f"{fmean(values):.6f}", len(values)]
                where = [task.benchmark, task.name, subset, metric]
                rows.append([*where, *numbers, *summary.setting])
    heads = ["benchmark", "task", "subset", "metric", "median", "mean", "seeds", "rate", "batch"]
    return show(Table(heads, rows), "csv")


def _cells(scores: Sequence[float]) -> list[str]:
    return [f"{score:.2f}" for score in (*scores, fmean(scores))]

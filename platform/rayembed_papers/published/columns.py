"""Turn the scores that papers print for a model into a column of a comparison."""

from collections.abc import Iterable, Mapping, Sequence

from rayembed.errors import ConfigError
from rayembed_extras.comparison.benchmark_lines import (
    MEAN,
    Line,
    average_groups,
    averages,
    sorted_lines,
)
from rayembed_extras.comparison.compare import Column, Origin
from rayembed_papers.published.figures import Figure, check_name, figures, labels

AIR_BENCH = "AIR-Bench_24.04"

SAME_TASKS = frozenset({"MTEB(eng, v1)", "MTEB(eng, v2)", "MTEB-MINI", "BEIR"})
"""Benchmarks in which a task of the same name has the same data, splits and subsets, so that their
printed scores are interchangeable."""

_SAME_AVERAGES: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("BEIR", "benchmark", ""): ("MTEB(eng, v1)", "Retrieval"),
    ("MTEB(eng, v1)", "category", "Retrieval"): ("BEIR", MEAN),
}
"""Averages over the same tasks: BEIR's 15 are the retrieval tasks of `MTEB(eng, v1)`."""


def published(model: str, benchmark: str, lines: Sequence[Line]) -> Column:
    """Build a column with the scores that papers report for a model on a benchmark.

    Averages are those that are printed, and where none is, the mean of the printed scores. Papers
    agree on what several of them print (a test sees to it), and the first counts.

    Raises:
        ConfigError: no paper has figures of that model, or none on that benchmark's tasks.
    """
    check_name("model", model, labels())
    found = figures(model=model)
    shared = SAME_TASKS if benchmark in SAME_TASKS else {benchmark}
    by_task: dict[tuple[str, str], Figure] = {}
    printed: dict[str, Figure] = {}
    for figure in found:
        if figure.level == "task" and figure.benchmark in shared:
            by_task.setdefault((figure.name, figure.subset), figure)
        elif (average := _average(figure, benchmark)) is not None:
            printed.setdefault(average, figure)
    known = {line.name: by_task[_key(line)] for line in lines if _key(line) in by_task}
    if not known and not printed:
        elsewhere = ", ".join(dict.fromkeys(figure.benchmark for figure in found))
        raise ConfigError(
            f"--published: no paper has published scores of {model!r} on {benchmark}; scores of "
            f"this model are published for {elsewhere}"
        )
    scores = {name: figure.score for name, figure in known.items()}
    computed = averages(scores, average_groups(benchmark, lines))
    used = {**known, **printed}
    return Column(
        label=labels()[model],
        published=True,
        scores=scores,
        averages={**computed, **{name: figure.score for name, figure in printed.items()}},
        origins={name: Origin(figure.source) for name, figure in used.items()},
        name=model,
        notes=(f"{labels()[model]}: as printed in {_sources(used.values())}.",),
    )


def _key(line: Line) -> tuple[str, str]:
    """Return the task and language under which papers report the score of a row of the
    score table.
    """
    return line.task, line.language


def _average(figure: Figure, benchmark: str) -> str | None:
    """Return the benchmark's average that a score belongs to; None for single tasks and other
    benchmarks.
    """
    if figure.benchmark == benchmark:
        return MEAN if figure.level == "benchmark" else figure.name
    other, name = _SAME_AVERAGES.get((figure.benchmark, figure.level, figure.name), ("", None))
    return name if other == benchmark else None


def _sources(used: Iterable[Figure]) -> str:
    """Name the papers and their tables, as `NV-Embed, Tables 1 and 14`."""
    tables: dict[str, set[int]] = {}
    for figure in used:
        tables.setdefault(figure.paper, set()).add(int(figure.table))
    return "; ".join(
        f"{paper}, Table{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, sorted(numbers)))}"
        for paper, numbers in tables.items()
    )


def lines_of_air_bench() -> dict[str, tuple[Line, ...]]:
    """AIR-Bench's name → its table rows, one for each task that papers report; mteb lacks this
    benchmark.
    """
    lines = {
        figure.name: Line(figure.name, figure.name.partition("_")[0], figure.metric, figure.name)
        for figure in figures(AIR_BENCH)
        if figure.level == "task"
    }
    return {AIR_BENCH: sorted_lines(list(lines.values()))}

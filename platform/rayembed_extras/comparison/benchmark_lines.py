"""Rows of a comparison's tables (tasks, or languages of a task): their result files and
averages.

Averages are as in the papers and in mteb's `Mean (Task)`: a category's is the mean over its tasks,
the benchmark's the mean over all tasks, not over categories. An aggregate such as CQADupstack
counts as one task; of MIRACL each language is a line.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.evaluation.averages import BY_LANGUAGE, CATEGORIES, MEAN_OF_16, NOT_AMONG_THE_16
from rayembed.results.scores import Place

MEAN = "Mean"
"""Name of the mean over all lines."""

OWN = "Own tasks"
"""Category of tasks that mteb does not know."""

_NO_MEAN = frozenset({"AIR-Bench_24.04"})
"""Benchmarks with different metrics by category, which report no overall mean."""


@dataclass(frozen=True)
class Line:
    """One row of a benchmark's score table: a task, or one language of a task."""

    name: str
    """Name in tables: mteb's task name, with the language if there are several."""
    category: str
    """mteb's type of the task."""
    metric: str
    """mteb's name of the main score; empty if not known."""
    task: str
    """mteb's name of the task, as result files have it."""
    places: tuple[Place, ...] = ()
    """Splits and subsets that must all be scored; the line's score is their mean."""
    language: str = ""
    """The subset, if a task has a line for each language."""
    dataset_revision: str = ""
    """Data revision of mteb's task; empty if not known."""
    parts: tuple["Line", ...] = ()
    """The tasks that an aggregate averages."""


def benchmark_lines(
    name: str, others: Mapping[str, tuple[Line, ...]] = MappingProxyType({})
) -> tuple[Line, ...]:
    """Return the table rows of a benchmark of text tasks.

    Args:
        others: further benchmarks, which mteb does not have → their lines.

    Raises:
        ConfigError: an unknown benchmark; names the nearest.
    """
    from rayembed.evaluation.benchmarks import benchmark_names, benchmark_tasks

    if name in others:
        return others[name]
    try:
        lines = lines_of([factory.load() for factory in benchmark_tasks(name)])
    except ConfigError:
        known = {*benchmark_names(), *others}
        raise ConfigError(f"--benchmark: no benchmark {name!r}; {nearest(name, known)}") from None
    if name not in BY_LANGUAGE:
        return lines
    return tuple(of_language for line in lines for of_language in _by_language(line))


def lines_of(tasks: Iterable[Any]) -> tuple[Line, ...]:
    """Make a table row for each of mteb's task objects, sorted by category and name."""
    return sorted_lines([_line(task) for task in tasks])


def result_lines(
    places: Mapping[str, Iterable[Place]],
    measures: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> tuple[Line, ...]:
    """Make a table row for each task with results; parts of an aggregate task that has its own row
    are left out.

    Args:
        places: task → what any of the compared models is scored on: all must be to be compared.
        measures: category and main score of own sets, by name.
    """
    import mteb

    lines: dict[str, Line] = {}
    parts: set[str] = set()
    for name in places:
        try:
            line = _line(mteb.get_task(name))
        except KeyError:
            line = Line(name, *measures.get(name, (OWN, "")), name)
        parts.update(part.task for part in line.parts)
        lines[name] = replace(line, places=tuple(sorted(set(places[name]))), parts=())
    return sorted_lines([line for line in lines.values() if line.task not in parts])


def by_category(lines: Iterable[Line]) -> dict[str, tuple[Line, ...]]:
    """Category → its table rows by name; categories in the order of the papers."""
    found: dict[str, list[Line]] = {}
    for line in sorted_lines(list(lines)):
        found.setdefault(line.category, []).append(line)
    return {category: tuple(members) for category, members in found.items()}


def average_groups(benchmark: str, lines: Sequence[Line]) -> dict[str, tuple[Line, ...]]:
    """Name of each average of a benchmark → the table rows that it averages: categories if there
    are several, MIRACL's 16 languages, then `MEAN`.
    """
    groups = by_category(lines)
    if len(groups) == 1:
        groups = {}
    if benchmark in BY_LANGUAGE:
        groups[MEAN_OF_16] = tuple(line for line in lines if line.language not in NOT_AMONG_THE_16)
    if benchmark not in _NO_MEAN:
        groups[MEAN] = tuple(lines)
    return groups


def averages(scores: Mapping[str, float], groups: Mapping[str, Sequence[Line]]) -> dict[str, float]:
    """Name of an average → mean over its table rows; averages with a missing score are left
    out.

    Args:
        scores: by the lines' `name`.
    """
    return {
        group: math.fsum(scores[line.name] for line in members) / len(members)
        for group, members in groups.items()
        if members and all(line.name in scores for line in members)
    }


def _line(task: Any) -> Line:
    metadata = task.metadata
    parts = tuple(_line(part) for part in metadata.tasks) if task.is_aggregate else ()
    # mteb writes an aggregate's score under this name, whatever its parts' subsets are called.
    subsets = ("default",) if parts else tuple(task.hf_subsets)
    return Line(
        name=metadata.name,
        category=metadata.type,
        metric=metadata.main_score,
        task=metadata.name,
        places=tuple((split, subset) for split in task.eval_splits for subset in subsets),
        dataset_revision="" if parts else str(metadata.dataset["revision"]),
        parts=parts,
    )


def _by_language(line: Line) -> tuple[Line, ...]:
    return tuple(
        replace(
            line,
            name=f"{line.task} ({language})",
            language=language,
            places=tuple(place for place in line.places if place[1] == language),
        )
        for language in dict.fromkeys(subset for _, subset in line.places)
    )


def sorted_lines(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Sort table rows by category, in the order of the papers, then by name."""

    def place(line: Line) -> tuple[int, str, str]:
        known = line.category in CATEGORIES
        order = CATEGORIES.index(line.category) if known else len(CATEGORIES)
        return order + (line.category == OWN), line.category, line.name.lower()

    return tuple(sorted(lines, key=place))

"""Compute averages over a benchmark's tasks as mteb's leaderboard and the papers do.

A category is a type of mteb's tasks. `Mean (Task)` is the mean over all tasks, which the papers
call the average of 56 tasks; `Mean (TaskType)` is the mean over the categories. CQADupstack is one
task, the mean of its twelve forums. An average is given where all of its tasks have scores.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mteb.results import TaskResult

    from rayembed.evaluation.jobs import TaskFactory

MEAN_OF_TASKS = "Mean (Task)"
MEAN_OF_CATEGORIES = "Mean (TaskType)"
MEAN_OF_18 = "Mean (18)"
"""Over all languages of MIRACL."""

MEAN_OF_16 = "Mean (16)"
"""Names the mean over MIRACL's languages without German and Yoruba (Nomic v2, Table 5)."""

CATEGORIES: tuple[str, ...] = (
    *("Retrieval", "Reranking", "Clustering", "PairClassification"),
    *("Classification", "STS", "Summarization"),
)
"""The seven of MTEB(eng, v1), in the order of NV-Embed's Table 1; others come after them."""

BY_LANGUAGE = frozenset({"MIRACL", "MIRACL-HardNegatives"})
"""Benchmarks that are one task of mteb's, with a score for each language."""

NOT_AMONG_THE_16 = frozenset({"de", "yo"})
"""MIRACL's surprise languages; mE5's authors report none of these two."""

MIRACL_LANGUAGES: tuple[str, ...] = (
    *("ar", "bn", "de", "en", "es", "fa", "fi", "fr", "hi"),
    *("id", "ja", "ko", "ru", "sw", "te", "th", "yo", "zh"),
)
"""Languages of Nomic v2's Table 5."""


def main_score(factory: "TaskFactory", result: "TaskResult") -> float:
    """Mean of the task's main score over the splits and subsets that the task factory
    selects.

    Not a number where one of them is missing; others in the result do not count.
    """
    return float(result.validate_and_filter_scores(factory.load()).get_score())


def averages(benchmark: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each task category, then `Mean (Task)` over tasks and `Mean (TaskType)`
    over categories.

    Args:
        scores: task name → main score, in any unit. Of an aggregate its own score counts or, where
            it has none, the mean of its members'. Tasks outside the benchmark are passed over.

    Raises:
        ConfigError: no such benchmark.
    """
    known = _with_aggregates(benchmark, scores)
    by_category = _categories(benchmark)
    found = {
        category: _mean([known[name] for name in names])
        for category, names in by_category.items()
        if all(name in known for name in names)
    }
    if len(found) == len(by_category):
        tasks = [known[name] for names in by_category.values() for name in names]
        of_categories = _mean(list(found.values()))
        found |= {MEAN_OF_TASKS: _mean(tasks), MEAN_OF_CATEGORIES: of_categories}
    return found


def miracl_averages(by_language: Mapping[str, float]) -> dict[str, float]:
    """Return `Mean (18)` over MIRACL's languages and `Mean (16)` without German and Yoruba; a mean
    with missing languages is left out (Nomic v2, Table 5).
    """
    sixteen = tuple(name for name in MIRACL_LANGUAGES if name not in NOT_AMONG_THE_16)
    return {
        mean: _mean([by_language[name] for name in names])
        for mean, names in ((MEAN_OF_18, MIRACL_LANGUAGES), (MEAN_OF_16, sixteen))
        if all(_is_number(by_language.get(name)) for name in names)
    }


def _categories(benchmark: str) -> Mapping[str, tuple[str, ...]]:
    from rayembed.evaluation.benchmarks import benchmark_tasks

    found: dict[str, list[str]] = {}
    for factory in benchmark_tasks(benchmark):
        found.setdefault(factory.load().metadata.type, []).append(factory.name)
    ordered = sorted(found, key=lambda name: CATEGORIES.index(name) if name in CATEGORIES else 99)
    return {name: tuple(dict.fromkeys(found[name])) for name in ordered}


def _with_aggregates(benchmark: str, scores: Mapping[str, float]) -> dict[str, float]:
    from rayembed.evaluation.benchmarks import benchmark_tasks

    known = {name: float(score) for name, score in scores.items() if _is_number(score)}
    for factory in benchmark_tasks(benchmark):
        task = factory.load()
        names = [m.metadata.name for m in task.metadata.tasks] if task.is_aggregate else []
        if names and factory.name not in known and all(name in known for name in names):
            known[factory.name] = _mean([known[name] for name in names])
    return known


def _is_number(score: float | None) -> bool:
    return score is not None and not math.isnan(score)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

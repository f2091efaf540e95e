"""How often two models are called different: where nothing differs, and where two points do.

    python benchmarks/interval_coverage.py

Models are simulated from scores of single queries that trainings of the quickstart with other seeds
had (`interval_coverage.json`, by task): queries are drawn with the scores of both, and which model
has which score is drawn, so that the expected difference is the one that is wanted and scores
correlate as measured. Classified texts and pairs are simulated from a normal error that both models
share and one of each (`SHARED`). A model is called different where the 95 % interval of
`rayembed.results.intervals` leaves out zero.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rayembed.display.tables import Table, console
from rayembed.results.intervals import PairedDifference, mean_difference, part_difference
from rayembed.results.items import Items, ScoredPairs, as_text, average_precision, scorer, spearman

SEEDS, STAGES = ("seed 1", "seed 2"), ("seed 1", "seed 1, stage 1")
"""Pairs of models: two seeds, or two stages of one training."""

_TWO_POINTS = 0.02

SHARED = 0.7
"""Share of the variance of simulated errors that both models have in common."""

ACCURACY, PRECISION, SPEARMAN = "accuracy", "average precision", "Spearman"

SIMULATED = [
    *((ACCURACY, count, 0) for count in (10, 20, 50, 200)),
    *((PRECISION, count, right) for count, right in ((60, 6), (200, 6), (20, 10), (60, 10))),
    *((PRECISION, count, right) for count, right in ((50, 25), (200, 20), (200, 100))),
    *((SPEARMAN, count, 0) for count in (10, 15, 30, 50, 200)),
]
"""Score, items, and how many of them are right (of average precision)."""


def measured(pair: tuple[str, str]) -> list[np.ndarray]:
    """(2, 200) scores of both models for each task."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return [np.array([rows[name] for name in pair]) for rows in json.loads(text).values()]


def drawn(
    scores: np.ndarray, count: int, expected: float, generator: np.random.Generator
) -> np.ndarray:
    """(2, count) scores of two models on drawn queries, whose expected difference is given."""
    size = np.abs(scores[0] - scores[1]).mean()
    chosen = scores[:, generator.integers(0, scores.shape[1], count)]
    high = np.maximum(*chosen), np.minimum(*chosen)
    wins = generator.random(count) < (1 + expected / size) / 2
    return np.where(wins, high, high[::-1])


def compared(
    tasks: list[np.ndarray],
    queries: int,
    expected: float,
    generator: np.random.Generator,
    *,
    spread: float = 0.0,
    over_tasks: bool = False,
) -> PairedDifference:
    """One comparison: the mean over tasks of drawn queries.

    Args:
        spread: standard deviation over tasks of the expected difference.
    """
    models = [
        drawn(scores, queries, expected + spread * generator.normal(), generator)
        for scores in tasks
    ]
    ours, theirs = ({f"t{i}": [m[side]] for i, m in enumerate(models)} for side in (0, 1))
    apart = {task: float(np.mean(ours[task]) - np.mean(theirs[task])) for task in ours}
    return mean_difference(apart, ours, theirs, over_tasks=over_tasks)


def simulated(
    score: str, count: int, right: int, generator: np.random.Generator
) -> tuple[Items, Items]:
    """Items of two models that are equally good."""
    errors = math.sqrt(SHARED) * generator.normal(size=count)
    errors = errors + math.sqrt(1 - SHARED) * generator.normal(size=(2, count))
    if score == ACCURACY:
        return tuple((errors < 1.0).astype(float))  # 84 of 100 texts are right
    truth = (np.arange(count) < right) * 2.0 if right else generator.normal(size=count)
    statistic = average_precision if right else spearman
    return tuple(ScoredPairs(as_text(truth + one), as_text(truth), statistic) for one in errors)


def compared_items(
    score: str, count: int, right: int, generator: np.random.Generator
) -> PairedDifference:
    """One comparison of two models that are equally good."""
    ours, theirs = simulated(score, count, right, generator)
    every = np.ones(count)
    apart = scorer(ours)(every) - scorer(theirs)(every)
    return mean_difference({"t": apart}, {"t": [ours]}, {"t": [theirs]})


def compared_part(
    score: str, count: int, right: int, generator: np.random.Generator
) -> PairedDifference:
    """One comparison of four fifths of a model's items, drawn by chance, with all."""
    items, _ = simulated(score, count, right, generator)
    return part_difference([items], [generator.permutation(np.arange(count) < 0.8 * count)])


def share_different(
    compare: Callable[[np.random.Generator], PairedDifference], times: int
) -> float:
    """Share of comparisons whose interval leaves out zero; without an interval none does."""
    generators = np.random.default_rng(0).spawn(times)
    found = [compare(generator) for generator in generators]
    return sum(one.interval is not None and not one.is_noise for one in found) / times


def best_possible(tasks: list[np.ndarray], queries: int, expected: float) -> float:
    """Share that a test which knows the variance of the differences calls different."""
    variance = sum(np.var(scores[0] - scores[1]) for scores in tasks) / len(tasks) ** 2
    z = expected / math.sqrt(float(variance) / queries)
    normal = NormalDist()
    return 1 - normal.cdf(1.96 - z) + normal.cdf(-1.96 - z)


def main(arguments: list[str]) -> None:
    """Print a table of scenarios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=1000, help="comparisons of a scenario")
    times = parser.parse_args(arguments).times
    rows: list[list[object]] = []

    def add(
        name: str, tasks: list[np.ndarray], queries: int, expected: float, **how: object
    ) -> None:
        share = share_different(lambda g: compared(tasks, queries, expected, g, **how), times)
        best = best_possible(tasks, queries, expected) if expected else 0.05
        shown = "" if how.get("spread") else f"{100 * best:.0f}"
        rows.append([name, len(tasks), queries, 100 * expected, f"{100 * share:.1f}", shown])

    for name, pair in (("two seeds", SEEDS), ("two stages of one training", STAGES)):
        tasks = measured(pair)
        for scores in tasks:
            correlation = np.corrcoef(scores)[0, 1]
            told = f"{name}, correlation {correlation:.2f}"
            for queries in (10, 20, 30, 50, 100, 200):
                add(told, [scores], queries, 0.0)
            for queries in (200, 400, 800, 1600):
                add(told, [scores], queries, _TWO_POINTS)
        add(f"{name}, both tasks", tasks, 200, 0.0)
        add(f"{name}, both tasks", tasks, 200, _TWO_POINTS)
    tasks = measured(SEEDS)
    for count in (3, 6, 15):
        add("over tasks, that differ by queries only", tasks * count, 200, 0.0, over_tasks=True)
        how = {"over_tasks": True, "spread": 0.02}
        add("over tasks, that differ by two points", tasks * count, 200, 0.0, **how)
        add("over tasks, that differ by queries only", tasks * count, 200, 0.02, over_tasks=True)
    for score, count, right in SIMULATED:
        told = f"{score}, {right} right pairs" if right else score
        for name, compare in (("equal", compared_items), ("four fifths with all", compared_part)):
            share = share_different(partial(compare, score, count, right), times)
            rows.append([f"{told}, {name}", 1, count, 0.0, f"{100 * share:.1f}", "5"])
    heads = ["Pair", "Tasks", "Items", "True points", "Called different of 100", "Best possible"]
    console().print(Table(heads, rows, align="lr"))


if __name__ == "__main__":
    main(sys.argv[1:])

"""How often two models are called different: where nothing differs, and where two points do.

    python benchmarks/interval_coverage.py

Models are simulated from scores of single queries that trainings of the quickstart with other seeds
had (`interval_coverage.json`, by task): queries are drawn with the scores of both, and which model
has which score is drawn, so that the expected difference is the one that is wanted and scores
correlate as measured. A model is called different where the 95 % interval of
`rayembed.results.intervals` leaves out zero.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rayembed.display.tables import Table, console
from rayembed.results.intervals import PairedDifference, mean_difference

SEEDS, STAGES = ("seed 1", "seed 2"), ("seed 1", "seed 1, stage 1")
"""Pairs of models: two seeds, or two stages of one training."""

_TWO_POINTS = 0.02


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


def share_different(
    compare: Callable[[np.random.Generator], PairedDifference], times: int
) -> float:
    """Share of comparisons whose interval leaves out zero."""
    generators = np.random.default_rng(0).spawn(times)
    return sum(not compare(generator).is_noise for generator in generators) / times


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
    heads = ["Pair", "Tasks", "Queries", "True points", "Called different of 100", "Best possible"]
    console().print(Table(heads, rows, align="lr"))


if __name__ == "__main__":
    main(sys.argv[1:])

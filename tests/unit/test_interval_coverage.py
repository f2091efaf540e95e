"""The simulation of intervals: equal models are seldom called different, better ones mostly.

Seeds are fixed, and bounds lie four standard errors of the shares from what is expected.
"""

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "interval_coverage.py"
spec = importlib.util.spec_from_file_location("interval_coverage", PATH)
coverage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(coverage)

TIMES = 200


def share(tasks, queries, expected, **how):
    compare = partial(coverage.compared, tasks, queries, expected, **how)
    return coverage.share_different(compare, TIMES)


@pytest.mark.parametrize("number", [0, 1])
def test_models_that_differ_by_nothing_are_seldom_called_different(number):
    tasks = [coverage.measured(coverage.SEEDS)[number]]
    assert share(tasks, 200, 0.0) < 0.05 + 4 * np.sqrt(0.05 * 0.95 / TIMES)


def test_noise_of_queries_over_tasks_is_not_counted_twice():
    tasks = coverage.measured(coverage.SEEDS) * 4
    found = share(tasks, 100, 0.0, over_tasks=True)
    assert 0.0 < found < 0.05 + 4 * np.sqrt(0.05 * 0.95 / TIMES)


def test_two_points_are_seen_as_often_as_the_best_test_would_see_them():
    tasks = coverage.measured(coverage.STAGES)
    best = coverage.best_possible(tasks, 200, 0.02)
    assert best > 0.75, "both tasks of the quickstart, between two stages of one training"
    assert share(tasks, 200, 0.02) > best - 4 * np.sqrt(best * (1 - best) / TIMES)


def test_models_are_drawn_with_the_wanted_difference_and_the_measured_correlation():
    scores = coverage.measured(coverage.SEEDS)[0]
    ours, theirs = coverage.drawn(scores, 200_000, 0.02, np.random.default_rng(0))
    assert np.mean(ours - theirs) == pytest.approx(0.02, abs=0.002)
    assert np.std(ours - theirs) == pytest.approx(np.std(scores[0] - scores[1]), rel=0.02)
    assert np.corrcoef(ours, theirs)[0, 1] == pytest.approx(np.corrcoef(scores)[0, 1], abs=0.02)


@pytest.mark.parametrize(
    ("score", "count", "right"),
    [("accuracy", 50, 0), ("average precision", 60, 10), ("Spearman", 30, 0)],
)
@pytest.mark.parametrize("compare", ["compared_items", "compared_part"])
def test_equal_models_and_parts_by_chance_are_seldom_called_different(compare, score, count, right):
    assert (score, count, right) in coverage.SIMULATED
    compare = partial(getattr(coverage, compare), score, count, right)
    times = 400 if score == "accuracy" else 60
    found = coverage.share_different(compare, times)
    assert found < 0.05 + 4 * np.sqrt(0.05 * 0.95 / times)


def test_simulated_models_are_equally_good_and_correlate():
    generator = np.random.default_rng(0)
    ours, theirs = coverage.simulated("accuracy", 100_000, 0, generator)
    assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=0.005)
    ours, theirs = coverage.simulated("average precision", 20_000, 5_000, generator)
    every = np.ones(20_000)
    assert ours.score(every) == pytest.approx(theirs.score(every), abs=0.01)
    assert 0.5 < ours.score(every) < 0.95
    values = [np.array(one.similarities.split(), float)[5_000:] for one in (ours, theirs)]
    assert np.corrcoef(values)[0, 1] == pytest.approx(coverage.SHARED, abs=0.02)

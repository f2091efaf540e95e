"""Scores of clean items, against other libraries, and how often their interval is right."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from rayembed_extras.clean_scores.bootstrap import (
    PartOutcomes,
    average_precision,
    clean_score,
    spearman,
)


def test_scores_of_pairs_are_those_of_other_libraries():
    random = np.random.default_rng(0)
    for _ in range(20):
        outcomes = random.integers(0, 12, 60) / 7  # many are equal
        grades, labels = random.integers(0, 6, 60), random.integers(0, 2, 60)
        assert spearman(outcomes, grades) == pytest.approx(spearmanr(outcomes, grades)[0])
        expected = average_precision_score(labels, outcomes)
        assert average_precision(outcomes, labels) == pytest.approx(expected)
    assert np.isnan(spearman(np.ones(5), np.arange(5.0)))
    assert np.isnan(average_precision(np.arange(5.0), np.zeros(5)))


def part(random, kind, easier=0.0):
    """Items of which a fifth were seen, and are easier."""
    seen = random.random(300) < 0.2
    if kind == "queries":
        return PartOutcomes(np.clip(random.random(300) + easier * seen, 0, 1), ~seen)
    grades = random.random(300)
    noise = random.normal(0, np.where(seen, 1 - easier, 1))
    return PartOutcomes(grades + noise, ~seen, grades, spearman)


@pytest.mark.parametrize(("kind", "number"), [("queries", 60), ("pairs", 15)])
def test_differences_by_chance_are_noise_and_real_ones_are_not(kind, number):
    random = np.random.default_rng(1)
    by_chance = [clean_score([part(random, kind)]).is_noise for _ in range(number)]
    assert sum(by_chance) >= 0.85 * number, "of 95 %"
    real = [clean_score([part(random, kind, 0.95)]) for _ in range(5)]
    assert not any(score.is_noise for score in real)
    assert all(score.difference < 0 for score in real)


def test_too_few_clean_items_have_no_score():
    outcomes = np.array([0.1, 0.9, 0.4])
    assert clean_score([PartOutcomes(outcomes, np.zeros(3, bool))]) is None
    everything = clean_score([PartOutcomes(outcomes, np.ones(3, bool))])
    assert (everything.interval, everything.difference, everything.is_noise) == (None, 0, False)
    pairs = PartOutcomes(outcomes, np.array([True, True, False]), np.arange(3.0), spearman)
    assert clean_score([pairs]) is None

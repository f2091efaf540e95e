"""Scores of clean items, and how often their interval is right."""

import numpy as np
import pytest

from rayembed.results.items import ScoredPairs, as_text, spearman
from rayembed_extras.clean_scores.bootstrap import clean_score


def part(random, kind, easier=0.0):
    """Items of which a fifth were seen, and are easier; and whether they are clean."""
    seen = random.random(300) < 0.2
    if kind == "queries":
        return np.clip(random.random(300) + easier * seen, 0, 1), ~seen
    grades = random.random(300)
    noise = random.normal(0, np.where(seen, 1 - easier, 1))
    return ScoredPairs(as_text(grades + noise), as_text(grades), spearman), ~seen


@pytest.mark.parametrize(("kind", "number"), [("queries", 60), ("pairs", 15)])
def test_differences_by_chance_are_noise_and_real_ones_are_not(kind, number):
    random = np.random.default_rng(1)

    def score(easier):
        items, clean = part(random, kind, easier)
        return clean_score([items], [clean])

    by_chance = [score(0.0).is_noise for _ in range(number)]
    assert sum(by_chance) >= 0.85 * number, "of 95 %"
    real = [score(0.95) for _ in range(5)]
    assert not any(score.is_noise for score in real)
    assert all(score.difference < 0 for score in real)


def test_too_few_clean_items_have_no_score():
    outcomes = np.array([0.1, 0.9, 0.4])
    assert clean_score([outcomes], [np.zeros(3, bool)]) is None
    everything = clean_score([outcomes], [np.ones(3, bool)])
    assert (everything.interval, everything.difference, everything.is_noise) == (None, 0, False)
    pairs = ScoredPairs(as_text(outcomes), "0 1 2", spearman)
    assert clean_score([pairs], [np.array([True, True, False])]) is None
    clean = np.arange(40) < 5
    assert clean_score([np.arange(40) / 40], [clean]) is None
    pairs = ScoredPairs(as_text(range(40)), as_text(range(40)), spearman)
    assert clean_score([pairs] * 2, [np.arange(40) < 39, np.arange(40) == 3]) is None
    assert clean_score([np.arange(40) / 40], [np.arange(40) < 6]).interval is not None

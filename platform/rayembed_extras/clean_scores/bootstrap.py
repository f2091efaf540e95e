"""Compute the score of all test items and of the unseen (clean) ones, with an interval of the
difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from rayembed.results.intervals import part_difference

_DRAWS = 400
"""Draws of pairs, whose correlation or precision is computed for each."""
_LIKELY = (2.5, 97.5)

Statistic = Callable[[np.ndarray, np.ndarray], float]
"""Function of outcomes and labels of pairs."""


@dataclass(frozen=True)
class PartOutcomes:
    """Outcomes (scores or cosines) of the test items of one split and subset."""

    outcomes: np.ndarray
    """(items,) float64."""
    clean: np.ndarray
    """(items,) bool: whether the item is in no plan."""
    labels: np.ndarray | None = None
    """(items,) float64 judged similarity of pairs; None: the score is the outcomes' mean."""
    statistic: Statistic | None = None
    """Score of pairs."""


@dataclass(frozen=True)
class CleanScore:
    """Score of all test items and of the clean (unseen) ones, averaged over splits and subsets."""

    all: float
    clean: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval of the clean score less the score of all, whose items are drawn
    together; None: all items are clean."""

    @property
    def difference(self) -> float:
        """Score of the clean items minus the score of all items."""
        return self.clean - self.all

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 0."""
        return self.interval is not None and self.interval[0] <= 0.0 <= self.interval[1]


def clean_score(parts: Sequence[PartOutcomes]) -> CleanScore | None:
    """Compute the score on clean items; None if a split or subset has too few of them."""
    scores = [(_score(part, everything(part)), _score(part, part.clean)) for part in parts]
    if not scores or not np.isfinite(np.array(scores)).all():
        return None
    every, clean = np.mean(scores, axis=0).tolist()
    if all(part.clean.all() for part in parts):
        return CleanScore(every, clean, None)
    if all(part.statistic is None for part in parts):
        outcomes = [part.outcomes.tolist() for part in parts]
        apart = part_difference(outcomes, [part.clean.tolist() for part in parts])
        return CleanScore(every, clean, apart.interval)
    generator = np.random.default_rng(0)
    draws = np.mean([_differences(part, generator) for part in parts], axis=0)
    low, high = np.nanpercentile(draws, _LIKELY)
    return CleanScore(every, clean, (float(low), float(high)))


def everything(part: PartOutcomes) -> np.ndarray:
    """Return a mask (items,) that selects all items."""
    return np.ones(len(part.outcomes), bool)


def _score(part: PartOutcomes, items: np.ndarray) -> float:
    if not items.any():
        return float("nan")
    if part.statistic is None or part.labels is None:
        return float(part.outcomes[items].mean())
    return part.statistic(part.outcomes[items], part.labels[items])


def _differences(part: PartOutcomes, generator: np.random.Generator) -> np.ndarray:
    """(draws,) score of the clean pairs minus score of all pairs, in each bootstrap sample."""
    size, found = len(part.outcomes), np.empty(_DRAWS)
    for draw in range(_DRAWS):
        drawn = generator.integers(0, size, size)
        labels = None if part.labels is None else part.labels[drawn]
        one = PartOutcomes(part.outcomes[drawn], part.clean[drawn], labels, part.statistic)
        found[draw] = _score(one, one.clean) - _score(one, everything(one))
    return found


def spearman(outcomes: np.ndarray, labels: np.ndarray) -> float:
    """Spearman's correlation; NaN if all outcomes or all labels are equal."""
    if len(outcomes) < 3 or np.ptp(outcomes) == 0 or np.ptp(labels) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(outcomes), rankdata(labels))[0, 1])


def average_precision(outcomes: np.ndarray, labels: np.ndarray) -> float:
    """Average precision of the pairs with label 1, ranked by outcome; equal outcomes form one
    threshold, as in scikit-learn. NaN without such pairs.
    """
    order = np.argsort(-outcomes, kind="stable")
    right = labels[order] > 0
    if not right.any():
        return float("nan")
    ends = np.flatnonzero(np.append(np.diff(outcomes[order]) != 0, True))
    hits = np.cumsum(right)[ends]
    gained = np.diff(hits, prepend=0) / hits[-1]
    return float((gained * hits / (ends + 1)).sum())

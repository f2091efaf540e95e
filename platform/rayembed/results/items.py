"""Outcomes of a task's test items as its stored result has them, and scores of resampled items.

An item is a query, a test text of a classification or a pair of texts. Most scores are means over
items. Of pairs, Spearman's correlation and average precision are made of all pairs together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from rayembed.results.scores import OF_QUERIES

OF_ITEMS, LABELS_OF_ITEMS = "outcomes_of_items", "labels_of_items"
"""Entries beside mteb's scores: outcomes in the order of the rows, of a search in the order of the
queries' ids, and the judged similarity of pairs. Both are one text, since mteb writes a list with
one number a line."""

_NEAR = 5e-4
"""Most difference between a task's main score and the same from the stored outcomes."""

Scorer = Callable[[np.ndarray], float]
"""Function from the (items,) number of times that each item counts to the score; NaN where it has
none."""


@dataclass(frozen=True)
class ScoredPairs:
    """Similarities and judgements of pairs of texts, as stored, and the score that they make."""

    similarities: str
    labels: str
    statistic: Callable[[np.ndarray, np.ndarray], Scorer]

    def __len__(self) -> int:
        return self.similarities.count(" ") + 1

    @cached_property
    def score(self) -> Scorer:
        """Score of the pairs by the number of times that each counts."""
        return self.statistic(_numbers(self.similarities), _numbers(self.labels))


Items = Sequence[float] | np.ndarray | ScoredPairs
"""Outcomes whose mean is a score, or pairs."""


def scorer(items: Items) -> Scorer:
    """Return the function that scores items by the number of times that each counts."""
    if isinstance(items, ScoredPairs):
        return items.score
    values = np.asarray(items, float)

    def mean(times: np.ndarray) -> float:
        number = times.sum()
        return float(times @ values / number) if number else float("nan")

    return mean


def item_scores(entry: Mapping[str, Any]) -> Items | None:
    """Read the items that make up the main score of one split and subset; None if none are stored,
    or if they make another score.
    """
    if OF_QUERIES in entry:
        return list(entry[OF_QUERIES])
    if OF_ITEMS not in entry or not isinstance(entry["main_score"], int | float):
        return None
    return _items(entry[OF_ITEMS], entry.get(LABELS_OF_ITEMS), float(entry["main_score"]))


@lru_cache(maxsize=64)  # of long texts, which are asked for with every difference
def _items(outcomes: str, labels: str | None, score: float) -> Items | None:
    kinds: list[Items] = [_numbers(outcomes)]
    if labels is not None:
        kinds = [ScoredPairs(outcomes, labels, kind) for kind in (spearman, average_precision)]
    for items in kinds:
        if abs(scorer(items)(np.ones(len(items))) - score) < _NEAR:
            return items
    return None


def as_text(values: np.ndarray | Sequence[float]) -> str:
    """Write outcomes as `OF_ITEMS` has them."""
    return " ".join(f"{float(value):.7g}" for value in values)


def _numbers(text: str) -> np.ndarray:
    found = np.array(text.split(), dtype=np.float64)
    found.setflags(write=False)
    return found


def spearman(similarities: np.ndarray, labels: np.ndarray) -> Scorer:
    """Spearman's correlation; NaN if all similarities or all labels are equal."""
    rank, rank_of_labels = _ranks(similarities), _ranks(labels)

    def score(times: np.ndarray) -> float:
        total = times.sum()
        if total < 3:
            return float("nan")
        one, other = rank(times), rank_of_labels(times)
        one, other = one - times @ one / total, other - times @ other / total
        size = ((times * one) @ one) * ((times * other) @ other)
        return float((times * one) @ other / np.sqrt(size)) if size > 0 else float("nan")

    return score


def _ranks(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Function from the number of times that each value counts to its rank, less a half; equal
    values share the mean of their ranks.
    """
    distinct, group = np.unique(values, return_inverse=True)

    def ranks(times: np.ndarray) -> np.ndarray:
        here = np.bincount(group, times, minlength=len(distinct))
        found: np.ndarray = (np.cumsum(here) - here / 2)[group]
        return found

    return ranks


def average_precision(similarities: np.ndarray, labels: np.ndarray) -> Scorer:
    """Average precision of the pairs with a label above 0, ranked by similarity; equal similarities
    form one threshold, as in scikit-learn. NaN without such pairs.
    """
    distinct, group = np.unique(-similarities, return_inverse=True)
    is_right = labels > 0

    def score(times: np.ndarray) -> float:
        every = np.bincount(group, times, minlength=len(distinct))
        right = np.bincount(group, times * is_right, minlength=len(distinct))
        hits = np.cumsum(right)
        if not hits[-1]:
            return float("nan")
        return float((right * hits / np.maximum(np.cumsum(every), 1)).sum() / hits[-1])

    return score

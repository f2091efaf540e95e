"""Compute the score of all test items and of the unseen (clean) ones, with an interval of the
difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.results.intervals import part_difference
from rayembed.results.items import Items, scorer


@dataclass(frozen=True)
class CleanScore:
    """Score of all test items and of the clean (unseen) ones, averaged over splits and subsets."""

    all: float
    clean: float
    interval: tuple[float, float] | None
    """95 % interval of the clean score less the score of all (`part_difference`); None: all items
    are clean."""

    @property
    def difference(self) -> float:
        """Score of the clean items minus the score of all items."""
        return self.clean - self.all

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 0."""
        return self.interval is not None and self.interval[0] <= 0.0 <= self.interval[1]


def clean_score(parts: Sequence[Items], clean: Sequence[np.ndarray]) -> CleanScore | None:
    """Compute the score on clean items; None if a split or subset has too few of them.

    Args:
        parts: items of each split and subset.
        clean: for each whether its items are clean.
    """
    scores = [
        (scorer(items)(np.ones(len(items))), scorer(items)(mask.astype(float)))
        for items, mask in zip(parts, clean, strict=True)
    ]
    if not scores or not np.isfinite(np.array(scores)).all():
        return None
    every, without = np.mean(scores, axis=0).tolist()
    if all(mask.all() for mask in clean):
        return CleanScore(every, without, None)
    apart = part_difference(parts, clean)
    return None if apart.interval is None else CleanScore(every, without, apart.interval)

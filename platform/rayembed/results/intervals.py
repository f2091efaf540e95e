"""Paired bootstrap intervals of score differences, over items and over tasks.

An item is a query, a classified text or a pair of texts. All models have the same items, so a draw
takes items with the outcomes of both (Efron and Tibshirani, An Introduction to the Bootstrap,
chapters 8 and 13). Of few items percentiles of draws are too narrow: they are widened as Student's
interval is (Hesterberg, What Teachers Should Know About the Bootstrap, 2015). Draws are the same in
every call.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np

from rayembed.results.items import Items, ScoredPairs, scorer

Parts = Sequence[Items]
"""A task's items for each of its subsets, in an order that all models share."""

_DRAWS = 2_000
_DRAWS_OF_PAIRS = 400
"""Draws of pairs, whose score is computed for each; they stand for five draws each."""
_LIKELY = (2.5, 97.5)
"""Percentiles of a 95 % interval."""
_FEWEST_TASKS = 5
"""Tasks from which on a draw takes tasks, too: fewer say nothing about further ones."""
_FEW = 10
"""Rows for a distinct one from which on counts are drawn: one costs as much as ten drawn rows."""
_ENTRIES_AT_ONCE = 1_000_000
"""Drawn counts or rows that are in memory at once."""
_ROUNDING = 1e-9
"""Error of a float that a difference of scores, which have five decimals, may have."""


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two scores of the same items, with its 95 % interval."""

    mean: float
    interval: tuple[float, float] | None = None
    """95 % bootstrap interval; None where no outcomes of items say how far chance goes."""
    drawn: str = ""
    """What was resampled, unless it was the items of all tasks."""

    @property
    def is_noise(self) -> bool:
        """Whether chance may explain the difference, because the interval includes zero."""
        if self.interval is None:
            return False
        low, high = self.interval
        return low <= _ROUNDING and high >= -_ROUNDING

    def times(self, factor: float) -> "PairedDifference":
        """Return the difference multiplied by a factor, such as 100 for percent."""
        if self.interval is None:
            return PairedDifference(factor * self.mean)
        low, high = self.interval
        return PairedDifference(factor * self.mean, (factor * low, factor * high), self.drawn)

    def shown(self, digits: int = 3) -> str:
        """Format the difference: `+0.034 (95 %: +0.021 to +0.047)`, `+0.005, within noise (95 %:
        -0.010 to +0.020)` or `+0.034, no interval`.
        """
        mean = f"{self.mean:+.{digits}f}"
        if self.interval is None:
            return f"{mean}, no interval"
        low, high = self.interval
        noise = ", within noise" if self.is_noise else ""
        return f"{mean}{noise} (95 %: {low:+.{digits}f} to {high:+.{digits}f}{self.drawn})"

    def __str__(self) -> str:
        return self.shown()


def mean_difference(
    differences: Mapping[str, float],
    ours: Mapping[str, Parts],
    theirs: Mapping[str, Parts],
    *,
    over_tasks: bool = False,
) -> PairedDifference:
    """Mean difference over tasks between two models, with a paired bootstrap interval.

    Items are drawn with replacement within each subset of a task. Tasks without outcomes of items
    stay as they are in all draws.

    Args:
        differences: task → difference of the main scores; the mean is over these.
        ours, theirs: task → items of both models, where there are any.
        over_tasks: whether the tasks stand for further ones: from five on they are drawn as well.
            What their differences vary beyond the noise of their items is added to the interval.
    """
    mean, count = fmean(differences.values()), len(differences)
    drawn = [task for task in differences if _same_items(ours.get(task), theirs.get(task))]
    by_tasks = over_tasks and count >= _FEWEST_TASKS
    if not (drawn or by_tasks):
        return PairedDifference(mean)
    generator = np.random.default_rng(0)
    centre = sum(differences[task] for task in differences if task not in drawn) / count
    sums = _Draws()
    for task in drawn:
        share = 1 / count / len(ours[task])
        for mine, other in zip(ours[task], theirs[task], strict=True):
            apart, draws = _difference(mine, other, generator)
            centre += share * apart
            sums.add(share * draws, len(mine))
    draws = sums.widened()
    if by_tasks:
        of_items = count**2 * sums.variance
        draws = draws + _task_draws(list(differences.values()), of_items, generator)
    if not np.isfinite(draws).all():  # of a collapsed model
        return PairedDifference(mean)
    low, high = centre + np.percentile(draws, _LIKELY)
    what = "tasks" if by_tasks and not drawn else ""
    if drawn and len(drawn) < count:
        what = f"items of {len(drawn)} of {count} tasks"
    return PairedDifference(mean, (float(low), float(high)), f", {what}" if what else "")


def part_difference(parts: Parts, chosen: Sequence[np.ndarray]) -> PairedDifference:
    """Mean over subsets of the score of chosen items minus the score of all items, with a bootstrap
    interval. Both come from the same draw, since the chosen ones are among all.

    Args:
        chosen: for each subset which of its items are chosen, at least one.
    """
    generator = np.random.default_rng(0)
    mean, sums = 0.0, _Draws()
    for items, mask in zip(parts, chosen, strict=True):
        taken = np.asarray(mask, float)
        if not taken.any():
            raise ValueError(
                "a subset has none of the items to compare, so its scores cannot be compared"
            )
        score, every = scorer(items), np.ones(len(items))
        apart = score(taken) - score(every)
        mean += apart / len(parts)
        if isinstance(items, ScoredPairs):
            draws = _spread(
                [score(times * taken) - score(times) for times in _times(len(items), generator)]
            )
        else:
            values = np.asarray(items, float)
            totals = _resampled(np.stack([values, taken, values * taken], axis=1), generator)
            # A draw without a chosen item says nothing and is left out below.
            with np.errstate(invalid="ignore"):
                draws = totals[:, 2] / totals[:, 1] - totals[:, 0] / len(values)
        sums.add((draws - apart) / len(parts), int(taken.sum()))
    low, high = mean + np.nanpercentile(sums.widened(), _LIKELY)
    return PairedDifference(float(mean), (float(low), float(high)))


class _Draws:
    """Sum of the draws of several subsets, as deviations from the estimate."""

    def __init__(self) -> None:
        self._sum = np.zeros(_DRAWS)
        self._variances: list[tuple[float, int]] = []

    @property
    def variance(self) -> float:
        """Variance of the sum."""
        return sum(variance for variance, _ in self._variances)

    def add(self, draws: np.ndarray, items: int) -> None:
        """Add the (draws,) deviations of a subset with this number of items, at least two."""
        # A sample's variance is smaller than that of what it is drawn from by (items - 1) / items.
        draws = draws * np.sqrt(items / max(1, items - 1))
        self._sum += draws
        self._variances.append((float(np.nanvar(draws)), max(1, items - 1)))

    def widened(self) -> np.ndarray:
        """(draws,) deviations times the ratio of Student's quantile to the normal one, by the
        degrees of freedom of Welch and Satterthwaite.
        """
        parts = sum(variance**2 / degrees for variance, degrees in self._variances)
        return self._sum * (_student(self.variance**2 / parts) if parts > 0 else 1.0)


def _student(degrees: float) -> float:
    """Ratio of the quantiles of Student's and of the normal distribution that bound 95 %."""
    from scipy.special import stdtrit  # what light jobs do without

    share = _LIKELY[1] / 100
    return float(stdtrit(degrees, share)) / NormalDist().inv_cdf(share)


def _same_items(ours: Parts | None, theirs: Parts | None) -> bool:
    """Whether both models have outcomes of the same number of items in each subset, at least two,
    and pairs with the same judgements.
    """
    if not ours or not theirs or len(ours) != len(theirs):
        return False
    return all(
        len(mine) == len(other) > 1
        and getattr(mine, "labels", None) == getattr(other, "labels", None)
        for mine, other in zip(ours, theirs, strict=True)
    )


def _difference(
    mine: Items, other: Items, generator: np.random.Generator
) -> tuple[float, np.ndarray]:
    """Difference of the scores of two models on a subset, and its (draws,) deviations in draws of
    items.
    """
    if isinstance(mine, ScoredPairs) and isinstance(other, ScoredPairs):
        return _difference_of_pairs(mine, other)
    apart = np.asarray(mine, float) - np.asarray(other, float)
    sums = _resampled(apart[:, None], generator)
    return float(apart.mean()), sums[:, 0] / len(apart) - apart.mean()


@lru_cache(maxsize=64)  # a report asks for each difference several times
def _difference_of_pairs(mine: ScoredPairs, other: ScoredPairs) -> tuple[float, np.ndarray]:
    generator = np.random.default_rng(zlib.crc32(mine.similarities.encode()))
    every = np.ones(len(mine))
    apart = mine.score(every) - other.score(every)
    draws = [mine.score(times) - other.score(times) for times in _times(len(mine), generator)]
    return apart, _spread(draws) - apart


def _times(items: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield, for each draw of pairs, the (items,) number of times that each is drawn."""
    for _ in range(_DRAWS_OF_PAIRS):
        yield np.bincount(generator.integers(0, items, items), minlength=items).astype(float)


def _spread(draws: Sequence[float]) -> np.ndarray:
    """Repeat the draws of pairs to as many as there are of others."""
    return np.resize(np.array(draws), _DRAWS)


def _resampled(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """(draws, C) sums of the columns of (Q, C) values over resampled rows."""
    count = len(values)
    distinct, numbers = np.unique(values, axis=0, return_counts=True)
    few = len(distinct) < count / _FEW
    at_once = max(1, _ENTRIES_AT_ONCE // (len(distinct) if few else count))
    sums = np.empty((_DRAWS, values.shape[1]))
    for start in range(0, _DRAWS, at_once):
        size = min(at_once, _DRAWS - start)
        if few:
            drawn = generator.multinomial(count, numbers / count, size=size) @ distinct
        else:
            drawn = values[generator.integers(0, count, (size, count))].sum(axis=1)
        sums[start : start + size] = drawn
    return sums


def _task_draws(
    differences: Sequence[float], of_items: float, generator: np.random.Generator
) -> np.ndarray:
    """Deviations (draws,) of the mean over resampled tasks from the mean over all tasks.

    Differences of tasks vary by the noise of their items, too, which is drawn already. They are
    shrunk so that only the rest of their variance counts, and never counts twice (Davison and
    Hinkley, Bootstrap Methods and their Application, section 3.8).

    Args:
        of_items: sum of the variances that resampled items give the tasks' differences.
    """
    count = len(differences)
    apart = np.asarray(differences) - fmean(differences)
    variance = float(apart @ apart) / (count - 1)
    rest = max(0.0, variance - of_items / count)
    if not rest > 0:  # or NaN
        return np.zeros(_DRAWS)
    shrunk = apart * _student(count - 1) * np.sqrt(rest / variance * count / (count - 1))
    counts = generator.multinomial(count, [1 / count] * count, size=_DRAWS)
    draws: np.ndarray = counts @ shrunk / count
    return draws

"""Paired bootstrap intervals of score differences, over items and over tasks.

An item is a query, a classified text or a pair of texts. All models have the same items, so a draw
takes items with the outcomes of both (Efron and Tibshirani, An Introduction to the Bootstrap,
chapters 8 and 13). Of few items percentiles of draws are too narrow: they are widened as Student's
interval is (Hesterberg, What Teachers Should Know About the Bootstrap, 2015). A part of the items
is compared with random choices of as many. Draws are the same in every call.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np

from rayembed.results.items import Items, ScoredPairs, average_precision, scorer, spearman

Parts = Sequence[Items]
"""A task's items for each of its subsets, in an order that all models share."""

_DRAWS = 2_000
_DRAWS_OF_PAIRS = 400
"""Draws of pairs, whose score is computed for each; they stand for five draws each."""
_LIKELY = (2.5, 97.5)
"""Percentiles of a 95 % interval."""
_FEWEST_TASKS = 5
"""Tasks from which on a draw takes tasks, too: fewer say nothing about further ones."""
_FEWEST_ITEMS = 6
"""Items from which on a sign test at 5 % may call two models different: all of five are better in
one by chance in 6 of 100 comparisons."""
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

    Items are drawn with replacement within each subset of a task. Tasks without outcomes of items,
    or without a score in most draws, stay as they are in all draws. Of fewer than six items the
    interval is all that scores can be.

    Args:
        differences: task → difference of the main scores; the mean is over these.
        ours, theirs: task → items of both models, where there are any.
        over_tasks: whether the tasks stand for further ones: from five on they are drawn as well.
            What their differences vary beyond the noise of their items is added to the interval.
    """
    mean, count = fmean(differences.values()), len(differences)
    generator = np.random.default_rng(0)
    drawn: dict[str, list[_Subset]] = {}
    for task in differences:
        subsets = _subsets(ours.get(task), theirs.get(task), generator)
        if subsets and all(subset.is_scored for subset in subsets):
            drawn[task] = subsets
    by_tasks = over_tasks and count >= _FEWEST_TASKS
    if not (drawn or by_tasks) or not np.isfinite(mean):  # NaN: of a collapsed model
        return PairedDifference(mean)
    fixed = sum(differences[task] for task in differences if task not in drawn) / count
    centre, reach, items, sums = fixed, 0.0, 0, _Draws()
    for subsets in drawn.values():
        share = 1 / count / len(subsets)
        for subset in subsets:
            centre += share * subset.apart
            reach += share * subset.reach
            items += subset.items
            sums.add(share * subset.draws, subset.items)
    draws = sums.widened()
    if by_tasks:
        of_items = count**2 * sums.variance
        draws = draws + _task_draws(list(differences.values()), of_items, generator)
        fixed, reach = 0.0, 2.0
    what = "tasks" if by_tasks and not drawn else ""
    if drawn and len(drawn) < count:
        what = f"items of {len(drawn)} of {count} tasks"
    limits = fixed - reach, fixed + reach
    if items < _FEWEST_ITEMS and not by_tasks:
        return PairedDifference(mean, limits, ", too few items")
    low, high = np.clip(centre + np.percentile(draws, _LIKELY), *limits)
    return PairedDifference(mean, (float(low), float(high)), f", {what}" if what else "")


def part_difference(parts: Parts, chosen: Sequence[np.ndarray]) -> PairedDifference:
    """Mean over subsets of the score of chosen items minus the score of all items, with a 95 %
    interval.

    Of means it is that of a permutation test, the difference less those of random choices of as
    many items, which is right for any number of them (Good, Permutation Tests, chapter 3). Of pairs
    both scores come from the same bootstrap draw. There is none for fewer than six chosen items,
    one pair of a subset, or subsets that most draws give no score.

    Args:
        chosen: for each subset which of its items are chosen, at least one.
    """
    generator = np.random.default_rng(0)
    mean, reach, number, sums, by_chance = 0.0, 0.0, 0, _Draws(), np.zeros(_DRAWS)
    for items, mask in zip(parts, chosen, strict=True):
        taken = np.asarray(mask, float)
        if not taken.any():
            raise ValueError(
                "a subset has none of the items to compare, so its scores cannot be compared"
            )
        score = scorer(items)
        apart = score(taken) - score(np.ones(len(items)))
        mean += apart / len(parts)
        reach += _reach(items) / len(parts)
        there = _number(items, taken)
        number += there
        if taken.all():
            continue  # never differs
        if isinstance(items, ScoredPairs):
            draws = _spread(
                [score(times * taken) - score(times) for times in _times(len(items), generator)]
            )
            draws = draws if there > 1 else draws * np.nan
            sums.add((draws - apart) / len(parts), min(there, int((1 - taken).sum())))
        else:
            values = np.asarray(items, float)
            by_chance += _of_random_choices(values, int(taken.sum()), generator) / len(parts)
    if all(np.all(mask) for mask in chosen):
        return PairedDifference(float(mean), (0.0, 0.0))
    draws = sums.widened() - by_chance
    if number < _FEWEST_ITEMS or not np.isfinite(draws).all():
        return PairedDifference(float(mean))
    # A random choice that differs as much counts against the difference.
    low = mean + np.percentile(draws, _LIKELY[0], method="lower")
    high = mean + np.percentile(draws, _LIKELY[1], method="higher")
    return PairedDifference(float(mean), (max(float(low), -reach), min(float(high), reach)))


def _of_random_choices(
    values: np.ndarray, taken: int, generator: np.random.Generator
) -> np.ndarray:
    """(draws,) means of random choices of `taken` values, less the mean of all."""
    count, means = len(values), np.empty(_DRAWS)
    distinct, numbers = np.unique(values, return_counts=True)
    if len(distinct) < count / _FEW:
        drawn = generator.multivariate_hypergeometric(numbers, taken, _DRAWS, method="marginals")
        means[:] = drawn @ distinct / taken - values.mean()
        return means
    at_once = max(1, _ENTRIES_AT_ONCE // count)
    for start in range(0, _DRAWS, at_once):
        size = min(at_once, _DRAWS - start)
        shuffled = generator.permuted(np.tile(values, (size, 1)), axis=1)
        means[start : start + size] = shuffled[:, :taken].mean(axis=1) - values.mean()
    return means


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
        self._variances.append((float(np.var(draws)), max(1, items - 1)))

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


@dataclass(frozen=True)
class _Subset:
    """Difference of the scores of two models on a subset, and its deviations in draws of items."""

    apart: float
    draws: np.ndarray
    """(draws,) deviations; NaN where most draws have no score."""
    items: int
    reach: float
    """Most that two scores can differ."""

    @property
    def is_scored(self) -> bool:
        """Whether the subset and its draws have scores."""
        return bool(np.isfinite(self.apart) and np.isfinite(self.draws).all())


def _subsets(
    ours: Parts | None, theirs: Parts | None, generator: np.random.Generator
) -> list[_Subset]:
    """Differences of a task's subsets; empty where the items of the models do not match."""
    if ours is None or theirs is None or not _same_items(ours, theirs):
        return []
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        items = min(_number(one, np.ones(len(one))) for one in (mine, other))
        reach = max(_reach(mine), _reach(other))
        found.append(_Subset(*_difference(mine, other, generator), items, reach))
    return found


def _number(items: Items, taken: np.ndarray) -> int:
    """Count the items that a score is a mean over: of average precision, the right pairs."""
    if isinstance(items, ScoredPairs) and items.statistic is average_precision:
        taken = taken * (np.array(items.labels.split(), float) > 0)
    return int(taken.sum())


def _reach(items: Items) -> float:
    """Most that two scores of the items can differ."""
    if isinstance(items, ScoredPairs):
        return 2.0 if items.statistic is spearman else 1.0
    return max(1.0, float(np.ptp(np.asarray(items, float))))


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


def _spread(draws: Sequence[float] | np.ndarray) -> np.ndarray:
    """Repeat the draws that have a score to as many as there are of others; NaN if they are less
    than half.
    """
    every = np.asarray(draws, float)
    scored = every[np.isfinite(every)]
    return np.resize(scored if 2 * len(scored) > len(every) else [np.nan], _DRAWS)


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

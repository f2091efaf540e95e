"""Paired bootstrap intervals of score differences, over queries and over tasks.

All models answer the same queries, so a draw takes queries with the scores of both (Efron and
Tibshirani, An Introduction to the Bootstrap, chapters 8 and 13). Draws are the same in every call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

Parts = Sequence[Sequence[float]]
"""Scores of a task's queries for each of its subsets, in an order that all models share."""

_DRAWS = 2_000
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
    """Difference of two scores of the same queries, with its 95 % interval."""

    mean: float
    interval: tuple[float, float] | None = None
    """95 % bootstrap interval; None where no scores of queries say how far chance goes."""
    drawn: str = ""
    """What was resampled, unless it was the queries of all tasks."""

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
        """Format the difference: `+0.034 (95 %: +0.021 to +0.047)`, or `+0.005, within noise (95 %:
        -0.010 to +0.020)`.
        """
        mean = f"{self.mean:+.{digits}f}"
        if self.interval is None:
            return mean
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

    Queries are drawn with replacement within each subset of a task. Tasks without scores of
    queries stay as they are in all draws.

    Args:
        differences: task → difference of the main scores; the mean is over these.
        ours, theirs: task → scores of single queries of both models, where there are any.
        over_tasks: whether the tasks stand for further ones: from five on they are drawn as well.
            What their differences vary beyond the noise of their queries is added to the interval.
    """
    mean = fmean(differences.values())
    drawn = [task for task in differences if _same_queries(ours.get(task), theirs.get(task))]
    by_tasks = over_tasks and len(differences) >= _FEWEST_TASKS
    if not (drawn or by_tasks):
        return PairedDifference(mean)
    generator = np.random.default_rng(0)
    draws = np.full(_DRAWS, float(sum(differences[t] for t in differences if t not in drawn)))
    variances = []
    for task in drawn:
        of_task = _mean_draws(ours[task], theirs[task], generator)
        variances.append(float(of_task.var()))
        draws += of_task
    draws /= len(differences)
    if by_tasks:
        draws += _task_draws(list(differences.values()), sum(variances), generator)
    if not np.isfinite(draws).all():  # of a collapsed model
        return PairedDifference(mean)
    low, high = np.percentile(draws, _LIKELY)
    what = "tasks" if by_tasks and not drawn else ""
    if drawn and len(drawn) < len(differences):
        what = f"queries of {len(drawn)} of {len(differences)} tasks"
    return PairedDifference(mean, (float(low), float(high)), f", {what}" if what else "")


def part_difference(scores: Parts, chosen: Sequence[Sequence[bool]]) -> PairedDifference:
    """Mean over the chosen queries minus the mean over all queries, with a bootstrap
    interval.

    Means are over subsets; a draw takes chosen and other queries of a subset together.

    Args:
        chosen: for each subset which of its queries are chosen, at least one.
    """
    generator = np.random.default_rng(0)
    mean, draws = 0.0, np.zeros(_DRAWS)
    for values, mask in zip(scores, chosen, strict=True):
        score, taken = np.asarray(values, float), np.asarray(mask, bool)
        if not taken.any():
            raise ValueError("the scores cannot be compared: a subset has no chosen query")
        mean += (score[taken].mean() - score.mean()) / len(scores)
        sums = _resampled(np.stack([score, taken, score * taken], axis=1), generator)
        # A draw without a chosen query says nothing and is left out below.
        with np.errstate(invalid="ignore"):
            means = sums[:, 2] / sums[:, 1]
        draws += (means - sums[:, 0] / len(score)) / len(scores)
    low, high = np.nanpercentile(draws, _LIKELY)
    return PairedDifference(float(mean), (float(low), float(high)))


def _same_queries(ours: Parts | None, theirs: Parts | None) -> bool:
    """Whether both models have scores of equally many queries in each subset."""
    if not ours or not theirs:
        return False
    return list(map(len, ours)) == list(map(len, theirs))


def _mean_draws(ours: Parts, theirs: Parts, generator: np.random.Generator) -> np.ndarray:
    """(draws,) mean differences of one task over its resampled queries."""
    draws = np.zeros(_DRAWS)
    for mine, other in zip(ours, theirs, strict=True):
        apart = np.asarray(mine, float) - np.asarray(other, float)
        sums = _resampled(apart[:, None], generator)
        draws += sums[:, 0] / len(apart) / len(ours)
    return draws


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
    differences: Sequence[float], of_queries: float, generator: np.random.Generator
) -> np.ndarray:
    """Deviations (draws,) of the mean over resampled tasks from the mean over all tasks.

    Differences of tasks vary by the noise of their queries, too, which is drawn already. They are
    shrunk so that only the rest of their variance counts, and never counts twice (Davison and
    Hinkley, Bootstrap Methods and their Application, section 3.8).

    Args:
        of_queries: sum of the variances that resampled queries give the tasks' differences.
    """
    from scipy.stats import norm, t  # half a second, which light jobs do without

    count = len(differences)
    apart = np.asarray(differences) - fmean(differences)
    variance = float(apart @ apart) / (count - 1)
    rest = max(0.0, variance - of_queries / count)
    if not rest > 0:  # or NaN
        return np.zeros(_DRAWS)
    # A sample's variance is smaller than that of what it is drawn from by (count - 1) / count, and
    # that of few tasks is itself uncertain: Student's t takes the place of the normal deviate.
    wider = t.ppf(_LIKELY[1] / 100, count - 1) / norm.ppf(_LIKELY[1] / 100)
    shrunk = apart * wider * np.sqrt(rest / variance * count / (count - 1))
    counts = generator.multinomial(count, [1 / count] * count, size=_DRAWS)
    draws: np.ndarray = counts @ shrunk / count
    return draws

"""Compute the spread of scores over seeds, and differences between measurements with the same
seeds.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

CONFIDENCE = 0.95
"""Probability of the intervals."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a number over repetitions, such as seeds."""

    mean: float
    deviation: float | None
    """Sample standard deviation (n - 1); None for a single number."""
    number: int

    def text(self, *, digits: int = 3, times: float = 1.0, signed: bool = False) -> str:
        """Format as `0.712 ± 0.004`, or the number alone if there is only one.

        Args:
            times: factor of what is shown, such as 100 for percent.
        """
        mean = f"{times * self.mean:{'+' if signed else ''}.{digits}f}"
        if self.deviation is None:
            return mean
        return f"{mean} ± {times * self.deviation:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    """Compute the mean and standard deviation of one or more numbers."""
    deviation = stdev(values) if len(values) > 1 else None
    return Spread(fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Difference:
    """Mean difference over seeds, with a confidence interval by Student's t."""

    mean: float
    half: float | None
    """Half-width of the 95 % interval; None for a single seed."""
    above: int
    """Number of seeds with a positive difference."""
    number: int
    """Number of seeds."""

    def verdict(self, least: float = 0.0) -> str:
        """Return `holds` or `reversed` if the whole interval is above or below a limit, otherwise
        `undecided`.
        """
        if self.half is None:
            return "undecided: one seed"
        if self.mean - self.half > least:
            return "holds"
        return "reversed" if self.mean + self.half < least else "undecided"

    def text(self, *, digits: int = 4, times: float = 1.0) -> str:
        """Format as `+0.0188 ± 0.0080 (3 of 3)`: mean, half-width of the interval, and seeds with a
        positive difference.

        Args:
            times: factor of the numbers, such as 100.
        """
        told = f"{times * self.mean:+.{digits}f}"
        if self.half is not None:
            told += f" ± {times * self.half:.{digits}f}"
        return f"{told} ({self.above} of {self.number})"


def difference(values: Sequence[float]) -> Difference:
    """Compute the mean difference and its interval from the differences of one or more seeds."""
    number, half = len(values), None
    if number > 1:
        from scipy.stats import t as student

        quantile = float(student.ppf((1 + CONFIDENCE) / 2, number - 1))
        half = quantile * stdev(values) / math.sqrt(number)
    return Difference(fmean(values), half, sum(value > 0 for value in values), number)


def paired(one: Mapping[Key, float], other: Mapping[Key, float]) -> list[float]:
    """Subtract the second mapping's values from the first's, for each key in both."""
    return [value - other[key] for key, value in one.items() if key in other]

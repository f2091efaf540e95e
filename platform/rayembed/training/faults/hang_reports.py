"""Combine the reports of workers that make no progress into one message. Imports little."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """Report of a worker: its process and node, its step, and the code line where it is stuck."""

    rank: int
    workers: int
    host: str
    process: int
    step: int
    """Number of completed steps."""
    place: str = ""
    """Innermost library line that the training is in; empty while it makes progress."""
    waits: bool = False
    """Whether that line waits for other workers in a collective."""

    @property
    def name(self) -> str:
        """Text that names the worker, its process and its node."""
        return f"worker {self.rank} (process {self.process} on {self.host})"


class Hang:
    """Collects the reports of all workers of a training, in the driver, and describes who is stuck
    where.
    """

    def __init__(self) -> None:
        self._known: dict[int, Where] = {}
        self._hang: dict[int, Where] = {}

    def take(self, where: Where) -> None:
        """Record a worker's report. A start of the workers makes earlier ones forgotten."""
        if where.place:
            self._hang[where.rank] = where
            return
        if where.rank in self._known:  # the workers were started anew
            self._known, self._hang = {}, {}
        self._known[where.rank] = where

    def is_over(self) -> None:
        """Discard hang reports, as the training continues."""
        self._hang = {}

    def __str__(self) -> str:
        """Describe which workers wait, which are stuck elsewhere and which have not reported; empty
        if no worker hangs.
        """
        if not self._hang:
            return ""
        return _told(self._known, self._hang)


def _told(known: Mapping[int, Where], hang: Mapping[int, Where]) -> str:
    silent = [known[number] for number in sorted(known.keys() - hang.keys())]
    places: dict[tuple[bool, int, str], list[int]] = {}
    for number, where in sorted(hang.items()):
        places.setdefault((where.waits, where.step, where.place), []).append(number)
    parts = [
        f"{_workers(numbers)} after step {step}: {'waiting for others' if waits else 'at work'} at "
        f"{place}"
        for (waits, step, place), numbers in sorted(places.items())
    ]
    for where in silent:
        parts.append(
            f"{where.name} says nothing: it was stopped, its node is cut off, or it holds Python's "
            "lock; look there with `ps` and in its kernel log"
        )
    missing = sorted(
        {where.rank for where in silent}
        | {number for number, where in hang.items() if not where.waits}
    )
    if missing and len(missing) < len(known):
        parts.append(f"so {_workers(missing)} did not arrive")
    return f"the training hangs. {'; '.join(parts)}"


def _workers(numbers: list[int]) -> str:
    """Format worker numbers, such as `worker 3` or `workers 0-2, 5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)
    return f"worker{'s' if len(numbers) > 1 else ''} {text}"

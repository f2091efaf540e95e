"""Progress of an evaluation: what its runners tell, and the line that a user sees."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayembed.display.progress import duration

if TYPE_CHECKING:
    from rayembed.evaluation.jobs import Job

_SECONDS_BEFORE_GUESSES = 30.0


class PoolProgress:
    """Progress of all runners, and the load of each worker."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}
        self._loads: dict[str, dict[int, int]] = {}

    def tell(self, task: str, done: int, known: int) -> None:
        """Note texts of a task that are embedded, and all that are known of."""
        self._of[task] = done, known

    def read(self) -> dict[str, tuple[int, int]]:
        """Texts of each task that are embedded, and all that are known of, by its last report."""
        return self._of

    def least_busy(self, task: str, loads: dict[int, int], open_for: list[int], home: int) -> int:
        """The worker of `open_for` with the fewest calls of all runners; it gets one more.

        Args:
            loads: worker → calls that it has of this task.
            home: which of equal ones is taken: the next from this number on.
        """
        self._loads[task] = dict(loads)
        totals = Counter[int]()
        for of_task in self._loads.values():
            totals.update(of_task)
        most = max(open_for) + 1
        number = min(open_for, key=lambda one: (totals[one], (one - home) % most))
        self._loads[task][number] = loads.get(number, 0) + 1
        return number

    def settle(self, task: str) -> None:
        """Note that no worker has anything to do for the task."""
        self._loads.pop(task, None)


class ProgressLog:
    """Tells of an evaluation: tasks done, texts with their rate, what runs now."""

    def __init__(self, jobs: "Sequence[Job]") -> None:
        self._sizes = {job.name: job.num_texts for job in jobs}
        self._texts: dict[str, tuple[int, int]] = {}
        self._first: tuple[float, int] | None = None
        self.finished: set[str] = set()
        """Names of the jobs that are done."""

    def update(self, texts: Mapping[str, tuple[int, int]]) -> None:
        """Note texts of each task that are embedded, and all that are known of."""
        self._texts = dict(texts)
        done = self._done()
        if done and self._first is None:
            self._first = time.monotonic(), done

    def text(self) -> str:
        """Tasks and texts; rate and time left without the start of workers and the first texts."""
        left = sum(
            max(size, self._texts.get(name, (0, 0))[1]) - self._texts.get(name, (0, 0))[0]
            for name, size in self._sizes.items()
            if name not in self.finished
        )
        running = [
            f"{name} {100 * texts // max(known, self._sizes.get(name, 0), 1)} %"
            for name, (texts, known) in self._texts.items()
            if name not in self.finished
        ]
        parts = [f"{len(self.finished)}/{len(self._sizes)} tasks"]
        if self._first is None:
            return f"{parts[0]}, no text embedded yet: workers and their model start"
        began, first = self._first
        done, seconds = self._done(), time.monotonic() - began
        parts.append(f"{done:,} texts")
        if done > first:
            rate = (done - first) / seconds
            parts.append(f"{rate:,.0f} texts/s")
            if left > 0 and seconds > _SECONDS_BEFORE_GUESSES:
                parts.append(f"about {duration(left / rate)} left")
        return ", ".join([*parts, *running])

    def _done(self) -> int:
        return sum(texts for texts, _ in self._texts.values())

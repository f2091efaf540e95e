"""Progress of an evaluation: reports of its runners, and the log line for the user."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayembed.display.progress import duration

if TYPE_CHECKING:
    from rayembed.evaluation.jobs import Job

_SECONDS_BEFORE_GUESSES = 30.0


class PoolProgress:
    """Progress of all runners, held by an actor."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}

    def tell(self, task: str, done: int, known: int) -> None:
        """Record the numbers of embedded and of known texts of a task."""
        self._of[task] = done, known

    def read(self) -> dict[str, tuple[int, int]]:
        """Last reported numbers of embedded and of known texts, by task."""
        return self._of


class ProgressLog:
    """Text of a progress line: finished tasks, texts with their rate, running tasks."""

    def __init__(self, jobs: "Sequence[Job]") -> None:
        self._sizes = {job.name: job.num_texts for job in jobs}
        self._texts: dict[str, tuple[int, int]] = {}
        self._first: tuple[float, int] | None = None
        self.finished: set[str] = set()
        """Names of the jobs that are done."""

    def update(self, texts: Mapping[str, tuple[int, int]]) -> None:
        """Record the numbers of embedded and of known texts of each task."""
        self._texts = dict(texts)
        done = self._done()
        if done and self._first is None:
            self._first = time.monotonic(), done

    def text(self) -> str:
        """Tasks and texts, with rate and remaining time measured after the workers' start and the
        first texts.
        """
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

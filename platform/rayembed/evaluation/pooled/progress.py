"""Progress of an evaluation: reports from its runner processes, and the progress line."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayembed.display.progress import duration

if TYPE_CHECKING:
    from rayembed.evaluation.jobs import Job

_SECONDS_BEFORE_GUESSES = 30.0


class PoolProgress:
    """Ray actor that collects the progress of all runner processes."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}

    def tell(self, task: str, done: int, known: int) -> None:
        """Record how many of a task's known texts are embedded."""
        self._of[task] = done, known

    def read(self) -> dict[str, tuple[int, int]]:
        """Return for each task how many texts are embedded and how many it has, as last
        reported.
        """
        return self._of


class ProgressLog:
    """Text of the progress line: finished tasks, embedded texts with their rate, running tasks."""

    def __init__(self, jobs: "Sequence[Job]") -> None:
        self._sizes = {job.name: job.num_texts for job in jobs}
        self._texts: dict[str, tuple[int, int]] = {}
        self._first: tuple[float, int] | None = None
        self.finished: set[str] = set()
        """Names of the jobs that are done."""

    def update(self, texts: Mapping[str, tuple[int, int]]) -> None:
        """Record for each task how many of its texts are embedded, out of the number known
        so far.
        """
        self._texts = dict(texts)
        done = self._done()
        if done and self._first is None:
            self._first = time.monotonic(), done

    def text(self) -> str:
        """Format tasks and texts with rate and remaining time; start-up and first texts do not
        count in the rate.
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

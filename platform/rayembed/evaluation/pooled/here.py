"""Jobs of an evaluation in this process, one after the other."""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets

from rayembed.errors import RayembedError, WorkerError
from rayembed.evaluation.jobs import Done, Job, longest_first
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import OneWorker, Workers
from rayembed.progress import doing, duration

if TYPE_CHECKING:
    from rayembed.evaluation.jobs import Job

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with a job's name, its texts embedded by now, and all that are known of."""


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


def run_here(
    jobs: Sequence[Job],
    spec: ModelSpec,
    store: EmbeddingStore | None,
    *,
    device: str = "cpu",
    progress: Progress = lambda _name, _done, _of: None,
) -> Iterator[Done]:
    """Each job with its outcome or its error, as they come; one that fails stops no other.

    The model is loaded once, and not at all without a job.

    Raises:
        RayembedError: the model cannot be loaded.
    """
    if not jobs:
        return
    worker = OneWorker(EncodingWorker(spec, store, device))
    for job in longest_first(jobs):

        def tell(_task: str, done: int, known: int, name: str = job.name) -> None:
            progress(name, done, known)

        yield finish(job, partial(PooledModel, spec, worker, progress=tell))


def run_shown(
    jobs: Sequence[Job], spec: ModelSpec, store: EmbeddingStore | None, workers: Workers
) -> Iterator[Done]:
    """Do what `run_here` does with one worker's threads and device, and log the progress."""
    import torch

    texts: dict[str, tuple[int, int]] = {}
    log = ProgressLog(jobs)

    def tell(name: str, done: int, known: int) -> None:
        texts[name] = done, known
        log.update(texts)

    threads = torch.get_num_threads()
    torch.set_num_threads(workers.torch_threads)
    try:
        device = "cuda" if workers.gpu else "cpu"
        with doing(log.text):
            for done in run_here(jobs, spec, store, device=device, progress=tell):
                log.finished.add(done.job.name)
                yield done
    finally:
        torch.set_num_threads(threads)


def finish(job: Job, make_model: Callable[[], Any]) -> Done:
    """The job done by a model of mteb that is made for it; its error as a value."""
    began = time.monotonic()
    try:
        with _no_progress_bars():
            outcome = job.run(make_model())
    except RayembedError as error:
        return Done(job, error=error, seconds=time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 # of mteb, of a task's code or its data: told by name
        logger.warning("%s failed:\n%s", job.name, traceback.format_exc())
        told = WorkerError(f"{job.name}: {type(error).__name__}: {error}")
        return Done(job, error=told, seconds=time.monotonic() - began)
    return Done(job, outcome, seconds=time.monotonic() - began)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the bar that mteb draws for each corpus it maps, which clutters a job's log."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()

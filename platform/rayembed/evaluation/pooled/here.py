"""Run evaluation jobs in this process, one after the other."""

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import datasets

from rayembed.display.progress import doing
from rayembed.errors import RayembedError, WorkerError
from rayembed.evaluation.jobs import Done, Job, longest_first
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import OneWorker, Workers
from rayembed.evaluation.pooled.progress import ProgressLog

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with a job's name, its texts embedded by now, and all that are known of."""


def run_here(
    jobs: Sequence[Job],
    spec: ModelSpec,
    store: EmbeddingStore | None,
    *,
    device: str = "cpu",
    progress: Progress = lambda _name, _done, _of: None,
) -> Iterator[Done]:
    """Run jobs and yield each with its outcome or error; a failed job does not stop the
    others.

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
    """Call `run_here` with the threads and device of one worker, and log the progress."""
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
    """Run the job with a newly made mteb model, and return its outcome or its error."""
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
    """Hide the progress bars of mteb, one for each corpus, which clutter a job's log."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()

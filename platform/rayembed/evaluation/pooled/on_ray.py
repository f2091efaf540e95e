"""Evaluate on Ray: workers hold the model, and runner processes send them the texts of
tasks.

What is done stands in `encoding_worker`, `model` and `jobs`; here is only who does it.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rayembed.display.progress import doing
from rayembed.errors import PlacementError, RayembedError, WorkerError
from rayembed.evaluation.jobs import Done, Job, longest_first
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.pooled.dispatch_on_ray import RayPool, Worker
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.here import Progress, finish, run_here
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.pooled.progress import PoolProgress, ProgressLog

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TELLS = 1.0
_SECONDS_BETWEEN_LOOKS = 1.0
_MOST_SECONDS_OF_A_START = 60.0
"""A first runner that took longer waited for a place, and did not only import."""


@contextmanager
def workers_on_ray(
    spec: ModelSpec, store: EmbeddingStore | None, workers: Workers
) -> Iterator[list[Any]]:
    """Start workers and yield their handles once the model is loaded; the workers end with the
    context.

    Raises:
        PlacementError: the cluster has not got what they need.
        RayembedError: the model cannot be loaded.
    """
    # Calls are not tried again by Ray: the pool gives them to a worker that lives.
    actor = ray.remote(
        num_cpus=workers.cpus, num_gpus=1 if workers.gpu else 0, max_restarts=-1, max_task_retries=0
    )(Worker)
    device = "cuda" if workers.gpu else "cpu"
    handles = [
        actor.remote(spec, store, device, workers.torch_threads) for _ in range(workers.number)
    ]
    try:
        try:
            for error in ray.get([handle.ready.remote() for handle in handles]):
                if error is not None:
                    raise error
        except (RayActorError, RayTaskError) as error:
            raise WorkerError(
                f"a worker of the evaluation ended while it loaded the model: {error}"
            ) from error
        yield handles
    finally:
        for handle in handles:
            ray.kill(handle)


def run_jobs(
    jobs: Sequence[Job],
    spec: ModelSpec,
    store: EmbeddingStore | None,
    workers: Workers,
) -> Iterator[Done]:
    """Run jobs in runner processes and yield each with its outcome or error; a failed job does not
    stop the others.

    Raises:
        PlacementError, RayembedError: as `workers_on_ray`.
        WorkerError: a lone worker died again and again, over one job and the next.
    """
    if not jobs:
        return
    _check_room(workers)
    log = ProgressLog(jobs)
    with doing(log.text):
        if workers.in_one_process:
            yield from _run_in_one_process(jobs, spec, store, workers, log)
            return
        with workers_on_ray(spec, store, workers) as handles:
            yield from run_on_workers(jobs, spec, workers, handles, log)


def _run_in_one_process(
    jobs: Sequence[Job],
    spec: ModelSpec,
    store: EmbeddingStore | None,
    workers: Workers,
    log: ProgressLog,
) -> Iterator[Done]:
    """Run the jobs one after the other in a single Ray task, with the same results as `run_jobs`.
    Where its process dies, another one does those that are left; a job over which it dies again and
    again is given up.
    """
    progress = ray.remote(num_cpus=0)(PoolProgress).remote()
    task = ray.remote(num_cpus=workers.cpus, num_returns="streaming", max_retries=0)(_run_all)
    left = {job.name: job for job in longest_first(jobs)}
    deaths = given_up = 0
    while left:
        stream = task.remote(list(left.values()), spec, store, workers.torch_threads, progress)
        try:
            for done in _as_they_come(stream, log, progress):
                del left[done.job.name]
                deaths = given_up = 0
                yield done
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, RayembedError) else error) from error
        except RayError as error:
            deaths += 1
            if deaths < workers.tries:
                logger.warning("an evaluation worker died; another worker continues its task")
                continue
            job = left.pop(next(iter(left)))
            lost = WorkerError(
                f"{deaths} workers died over the same texts, in task {job.name}: {error}\nIf "
                "memory ran out, lower model.tokens_per_batch or give the nodes more; submit the "
                "job again. What was embedded is kept."
            )
            deaths, given_up = 0, given_up + 1
            if left and given_up > 1:  # it is not the texts; the next ones would end alike
                raise lost from error
            yield Done(job, error=lost)


def _as_they_come(stream: Any, log: ProgressLog, progress: Any) -> Iterator[Done]:
    """Yield the outcomes of a streaming Ray task as they arrive, and update the progress
    display.
    """
    while True:
        ready, _ = ray.wait([stream], timeout=_SECONDS_BETWEEN_LOOKS, fetch_local=False)
        log.update(ray.get(progress.read.remote()))
        if not ready:
            continue
        try:
            reference = next(stream)
        except StopIteration:
            return
        done: Done = ray.get(reference)
        log.finished.add(done.job.name)
        yield done


def _run_all(
    jobs: Sequence[Job], spec: ModelSpec, store: EmbeddingStore | None, threads: int, progress: Any
) -> Iterator[Done]:
    """Run the jobs in this process and report their progress; body of a Ray task."""
    import torch

    torch.set_num_threads(threads)
    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    yield from run_here(jobs, spec, store, progress=_telling(progress))


def _telling(progress: Any) -> Progress:
    """Return a function that reports progress to the actor, at most once in a few seconds."""
    last = 0.0

    def tell(name: str, done: int, known: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_TELLS:
            last = time.monotonic()
            progress.tell.remote(name, done, known)

    return tell


def run_on_workers(
    jobs: Sequence[Job],
    spec: ModelSpec,
    workers: Workers,
    handles: Sequence[Any],
    log: ProgressLog,
) -> Iterator[Done]:
    """Call `run_jobs` with workers that have loaded the spec's model, and log the progress."""
    progress = ray.remote(num_cpus=0)(PoolProgress).remote()
    # Tasks share the CPUs that there are.
    run = ray.remote(num_cpus=0, max_retries=2, scheduling_strategy="SPREAD")(_run)
    waiting = deque(longest_first(jobs))
    flying: dict[Any, Job] = {}
    asked, began = time.monotonic(), None
    while waiting or flying:
        at_once = runners_by_now(workers, time.monotonic(), asked, began)
        while waiting and len(flying) < at_once:
            job = waiting.popleft()
            flying[run.remote(job, spec, handles, workers.tries, progress)] = job
        finished, _ = ray.wait(list(flying), timeout=_SECONDS_BETWEEN_LOOKS)
        told = ray.get(progress.read.remote())
        log.update(told)
        if told and began is None:
            began = time.monotonic()
        for reference in finished:
            job = flying.pop(reference)
            log.finished.add(job.name)
            yield _done(job, reference)


def runners_by_now(workers: Workers, now: float, asked: float, began: float | None) -> int:
    """Number of tasks to run concurrently: as configured, else 1 at the start, doubled after each
    period that a runner takes to start. So small tasks are not left to processes that import for
    longer than the tasks take.

    Args:
        now: seconds of a clock.
        asked: when the first runner was asked for.
        began: when it was there; None: it is not yet.
    """
    if workers.tasks_at_once is not None:
        return workers.tasks_at_once
    if began is None:
        return 1
    start = min(began - asked, _MOST_SECONDS_OF_A_START)
    doublings = min(int((now - began) / start), workers.runners)
    return min(workers.runners, 1 << doublings)


def _done(job: Job, reference: Any) -> Done:
    try:
        done: Done = ray.get(reference)
    except RayError as lost:
        return Done(job, error=WorkerError(f"{job.name} was lost with its process: {lost}"))
    return done


def _run(job: Job, spec: ModelSpec, handles: Sequence[Any], tries: int, progress: Any) -> Done:
    """Run a job and return it with its outcome or its error; body of a Ray task."""
    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    progress.tell.remote(job.name, 0, 0)  # the runner is there
    tell = _telling(progress)

    def make_model() -> PooledModel:
        pool = RayPool(handles, tries)
        return PooledModel(spec, pool, progress=lambda _, done, known: tell(job.name, done, known))

    return finish(job, make_model)


def _check_room(workers: Workers) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = {"CPU": workers.cpus, **({"GPU": 1.0} if workers.gpu else {})}
    fit = sum(int(min(node.get(kind, 0.0) / n for kind, n in each.items())) for node in nodes)
    if fit < workers.number:
        wanted = " and ".join(f"{amount:g} {kind}s" for kind, amount in each.items())
        there = "; ".join(
            ", ".join(f"{node.get(kind, 0.0):g} {kind}s" for kind in each) for node in nodes
        )
        raise PlacementError(
            f"placement.workers={workers.number} need {wanted} each on one node, but only {fit} "
            f"workers fit: the cluster's nodes have {there}. Request fewer workers, or less for "
            "each" + (", or compute on CPUs (placement.use_gpu=false)" if workers.gpu else "")
        )

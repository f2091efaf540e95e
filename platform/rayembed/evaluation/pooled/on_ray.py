"""Evaluation on Ray: workers that hold the model, and runners that hand tasks to them.

What is done stands in `encoding_worker`, `model` and `jobs`; here is only who does it.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from rayembed.errors import PlacementError, RayembedError, WorkerError
from rayembed.evaluation.jobs import Done, Job, longest_first
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.here import Progress, finish, run_here
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import Call, bucket_of, do
from rayembed.evaluation.pooled.progress import SECONDS_BETWEEN_LOGS, PoolProgress, ProgressLog

logger = logging.getLogger(__name__)

_CALLS_PER_WORKER = 2
"""Calls of one runner in each worker: the next one is there when a worker has done one."""

_SECONDS_WITHOUT_WORKERS = 600.0
_SECONDS_BETWEEN_TELLS = 1.0


@dataclass(frozen=True)
class Workers:
    """How many workers, with what."""

    number: int = 1
    cpus: float = 1.0
    """Reserved for each worker."""
    threads: int | None = None
    """Threads of torch in each worker; None: `cpus`, rounded down, at least 1."""
    gpu: bool = False
    """One for each worker."""
    tasks_at_once: int | None = None
    """None: one more than workers, so that none waits while a task computes its score; at most
    8."""
    cpus_per_task: float = 0.0
    """Reserved for each task that runs."""
    tries: int = 5
    """Tries of texts whose worker dies, also of those that only waited for it: which of them it
    died over cannot be told."""

    @property
    def runners(self) -> int:
        """Tasks that run side by side."""
        return self.tasks_at_once or min(self.number + 1, 8)

    @property
    def in_one_process(self) -> bool:
        """Whether one process embeds and scores: further ones would share its cores and only add
        their imports. Beside a GPU they fit classifiers while it embeds.
        """
        return self.number == 1 and not self.gpu and self.tasks_at_once is None


class Worker:
    """An `EncodingWorker` in a process of its own. The model is loaded by the first call."""

    def __init__(
        self, spec: ModelSpec, store: EmbeddingStore | None, device: str, threads: int
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self._made = spec, store, device
        self._worker: EncodingWorker | None = None

    def ready(self) -> RayembedError | None:
        """None when the model is loaded, or the error that says why it cannot be."""
        try:
            self._loaded()
        except RayembedError as error:
            return error
        return None

    def do(self, call: Call, queries: Any = None, context: Any = None) -> Any:
        """The call's result, or an error of ours as a value: raised, it would come wrapped."""
        try:
            return do(self._loaded(), call, queries, context)
        except RayembedError as error:
            return error

    def _loaded(self) -> EncodingWorker:
        if self._worker is None:
            self._worker = EncodingWorker(*self._made)
        return self._worker


class SharedLoads:
    """The calls that all runners have given to the workers, as the runner of one task asks."""

    def __init__(self, progress: Any, task: str) -> None:
        """The loads.

        Args:
            progress: the `PoolProgress` of all runners, an actor.
        """
        self._progress, self._task = progress, task

    def least_busy(self, loads: dict[int, int], open_for: list[int], home: int) -> int:
        """Ask the actor for `PoolProgress.least_busy`."""
        number: int = ray.get(self._progress.least_busy.remote(self._task, loads, open_for, home))
        return number

    def settle(self) -> None:
        """Tell the actor `PoolProgress.settle`."""
        self._progress.settle.remote(self._task)


class RayPool:
    """Workers on a cluster as one runner sees them.

    A call whose worker dies is given to another one; the worker is used again when Ray has
    restarted it.
    """

    def __init__(self, workers: Sequence[Any], tries: int, loads: SharedLoads) -> None:
        self._workers, self._tries, self._loads = list(workers), tries, loads

    def share(self, vectors: np.ndarray) -> Any:
        """A reference that Ray replaces by the array where a worker is called."""
        return ray.put(vectors)

    def run(
        self, calls: Iterable[Call], queries: Any = None, context: Any = None
    ) -> Iterator[tuple[Call, Any]]:
        """Each call with its result, as they come.

        Raises:
            RayembedError: what a worker raised.
            WorkerError: a call killed worker after worker, or none is left.
        """
        waiting, again = iter(calls), deque[Call]()
        turn = _Turn(self._workers, self._tries)
        while True:
            while open_for := turn.open_for():
                call = again.popleft() if again else next(waiting, None)
                if call is None:
                    break
                number = self._loads.least_busy(turn.loads(), open_for, bucket_of(call).number)
                reference = self._workers[number].do.remote(call, queries, context)
                turn.give(number, call, reference)
            if not turn.flying:
                self._loads.settle()
                return
            for call, result in turn.finished():
                if isinstance(result, RayembedError):
                    raise result
                if isinstance(result, RayActorError):
                    again.append(turn.failed(call, result))
                    continue
                turn.tries.pop(id(call), None)
                yield call, result


@dataclass
class _Turn:
    """Calls of one `run` by worker, and the workers that are down or gone."""

    workers: list[Any]
    most_tries: int
    flying: dict[Any, tuple[int, Call]] = field(default_factory=dict)
    """Reference → number of the worker and its call."""
    down: dict[Any, int] = field(default_factory=dict)
    """Reference of a `ready` that has not come back → number of the worker."""
    gone: set[int] = field(default_factory=set)
    tries: dict[int, int] = field(default_factory=dict)

    def open_for(self) -> list[int]:
        """Workers that take one more call."""
        until = time.monotonic() + _SECONDS_WITHOUT_WORKERS
        while not (loads := self.loads()):
            if len(self.gone) == len(self.workers):
                raise WorkerError(
                    "all workers of the evaluation are gone; what they embedded is kept: give the "
                    "cluster its nodes back and submit the job again"
                )
            self._wait_for_any(until)
        return [number for number, calls in loads.items() if calls < _CALLS_PER_WORKER]

    def loads(self) -> dict[int, int]:
        """Worker → its calls, of those that can be used."""
        loads = dict.fromkeys(range(len(self.workers)), 0)
        for number, _ in self.flying.values():
            loads[number] += 1
        for number in (*self.down.values(), *self.gone):
            loads.pop(number, None)
        return loads

    def give(self, number: int, call: Call, reference: Any) -> None:
        """Note that the worker has the call."""
        self.flying[reference] = number, call

    def finished(self) -> Iterator[tuple[Call, Any]]:
        """Calls that are done, with their result or the error of a worker that died."""
        done, _ = ray.wait([*self.flying, *self.down], num_returns=1)
        for reference in done:
            if reference in self.down:
                self._back(reference)
                continue
            number, call = self.flying.pop(reference)
            try:
                yield call, ray.get(reference)
            except RayActorError as error:
                if number not in (*self.down.values(), *self.gone):
                    self.down[self.workers[number].ready.remote()] = number
                yield call, error
            except RayTaskError as error:
                raise WorkerError(f"a worker of the evaluation failed: {error}") from error

    def failed(self, call: Call, error: RayActorError) -> Call:
        """The call, to be tried again.

        Raises:
            WorkerError: it has been tried often enough.
        """
        self.tries[id(call)] = self.tries.get(id(call), 0) + 1
        if self.tries[id(call)] >= self.most_tries:
            raise WorkerError(
                f"{self.most_tries} workers died over the same texts: {error}\nIf memory ran out, "
                "lower model.tokens_per_batch or placement.workers, or give the nodes more; submit "
                "the job again. What was embedded is kept."
            ) from error
        logger.warning("a worker of the evaluation died; its texts go to another one")
        return call

    def _back(self, reference: Any) -> None:
        number = self.down.pop(reference)
        try:
            error = ray.get(reference)
        except ActorDiedError:
            self.gone.add(number)
            return
        except RayActorError:
            self.down[self.workers[number].ready.remote()] = number
            time.sleep(1.0)
            return
        if error is not None:
            raise error

    def _wait_for_any(self, until: float) -> None:
        """Wait for a worker that may be back. One that dies again and again while it loads the
        model comes back from every wait, so the time is that of all waits together.
        """
        left = until - time.monotonic()
        done = []
        if left > 0:
            done, _ = ray.wait(list(self.down), num_returns=1, timeout=left)
        if not done:
            raise WorkerError(
                f"no worker of the evaluation came back within {_SECONDS_WITHOUT_WORKERS:.0f} s; "
                "what they embedded is kept: submit the job again when the cluster has nodes"
            )
        for reference in done:
            self._back(reference)


@contextmanager
def workers_on_ray(
    spec: ModelSpec, store: EmbeddingStore | None, workers: Workers
) -> Iterator[list[Any]]:
    """Handles of workers that have loaded the model; they end with the context.

    Raises:
        PlacementError: the cluster has not got what they need.
        RayembedError: the model cannot be loaded.
    """
    threads = workers.threads or max(1, int(workers.cpus))
    # Calls are not tried again by Ray: the pool gives them to a worker that lives.
    actor = ray.remote(
        num_cpus=workers.cpus, num_gpus=1 if workers.gpu else 0, max_restarts=-1, max_task_retries=0
    )(Worker)
    device = "cuda" if workers.gpu else "cpu"
    handles = [actor.remote(spec, store, device, threads) for _ in range(workers.number)]
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
    """Each job with its outcome or its error, as they come; one that fails stops no other.

    Raises:
        PlacementError, RayembedError: as `workers_on_ray`.
        WorkerError: a lone worker died again and again, over one job and the next.
    """
    if not jobs:
        return
    _check_room(workers)
    if workers.in_one_process:
        yield from _run_in_one_process(jobs, spec, store, workers)
        return
    with workers_on_ray(spec, store, workers) as handles:
        yield from run_on_workers(jobs, spec, workers, handles)


def _run_in_one_process(
    jobs: Sequence[Job], spec: ModelSpec, store: EmbeddingStore | None, workers: Workers
) -> Iterator[Done]:
    """Run the jobs as `run_jobs` does, by one Ray task that does one job after the other. Where its
    process dies, another one does those that are left; a job over which it dies again and again is
    given up.
    """
    threads = workers.threads or max(1, int(workers.cpus))
    progress = ray.remote(num_cpus=0)(PoolProgress).remote()
    task = ray.remote(num_cpus=workers.cpus, num_returns="streaming", max_retries=0)(_run_all)
    left = {job.name: job for job in longest_first(jobs)}
    log, deaths, given_up = ProgressLog(jobs), 0, 0
    while left:
        stream = task.remote(list(left.values()), spec, store, threads, progress)
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
                logger.warning("a worker of the evaluation died; another one does what is left")
                continue
            job = left.pop(next(iter(left)))
            lost = WorkerError(
                f"{deaths} workers died over the same texts, those of {job.name}: {error}\nIf "
                "memory ran out, lower model.tokens_per_batch or give the nodes more; submit the "
                "job again. What was embedded is kept."
            )
            deaths, given_up = 0, given_up + 1
            if left and given_up > 1:  # it is not the texts; the next ones would end alike
                raise lost from error
            yield Done(job, error=lost)


def _as_they_come(stream: Any, log: ProgressLog, progress: Any) -> Iterator[Done]:
    """Outcomes of a streaming task, with a line of progress every few seconds meanwhile."""
    while True:
        ready, _ = ray.wait([stream], timeout=SECONDS_BETWEEN_LOGS, fetch_local=False)
        log.show(ray.get(progress.read.remote()))
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
    """Run the jobs in this process and report their progress; a Ray task."""
    import torch

    torch.set_num_threads(threads)
    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    yield from run_here(jobs, spec, store, progress=_telling(progress))


def _telling(progress: Any) -> Progress:
    """Function that reports progress to the actor, not more often than a user could read."""
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
) -> Iterator[Done]:
    """Run the jobs as `run_jobs` does, by workers that have loaded the spec's model."""
    progress = ray.remote(num_cpus=0)(PoolProgress).remote()
    run = ray.remote(num_cpus=workers.cpus_per_task, max_retries=2, scheduling_strategy="SPREAD")(
        _run
    )
    waiting = deque(longest_first(jobs))
    flying: dict[Any, Job] = {}
    log = ProgressLog(jobs)
    while waiting or flying:
        while waiting and len(flying) < workers.runners:
            job = waiting.popleft()
            flying[run.remote(job, spec, handles, workers.tries, progress)] = job
        finished, _ = ray.wait(list(flying), timeout=SECONDS_BETWEEN_LOGS)
        log.show(ray.get(progress.read.remote()))
        for reference in finished:
            job = flying.pop(reference)
            log.finished.add(job.name)
            yield _done(job, reference)


def _done(job: Job, reference: Any) -> Done:
    try:
        done: Done = ray.get(reference)
    except RayError as lost:
        return Done(job, error=WorkerError(f"{job.name} was lost with its process: {lost}"))
    return done


def _run(job: Job, spec: ModelSpec, handles: Sequence[Any], tries: int, progress: Any) -> Done:
    """The job with its outcome, or its error as a value; a Ray task."""
    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    tell, loads = _telling(progress), SharedLoads(progress, job.name)

    def make_model() -> PooledModel:
        pool = RayPool(handles, tries, loads)
        return PooledModel(spec, pool, progress=lambda _, done, known: tell(job.name, done, known))

    try:
        return finish(job, make_model)
    finally:
        loads.settle()


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
            f"placement.workers={workers.number} need {wanted} each, whole on one node, and {fit} "
            f"fit: the cluster's nodes have {there}. Ask for fewer workers or less for each"
        )
    left = sum(node.get("CPU", 0.0) for node in nodes) - workers.number * workers.cpus
    if workers.cpus_per_task > left:
        raise PlacementError(
            f"placement.cpus_per_task {workers.cpus_per_task:g} is more than the {left:g} CPUs of "
            f"the cluster that {workers.number} workers leave: no task would ever begin; ask for "
            "fewer workers, or for 0 to share their CPUs"
        )

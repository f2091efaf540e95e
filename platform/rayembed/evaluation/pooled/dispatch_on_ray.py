"""Ray actors that hold the model, and the pool that distributes texts among them.

A worker that dies is replaced; what it had is given to others.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from rayembed.errors import RayembedError, WorkerError
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.pool import Call, do, number_of

logger = logging.getLogger(__name__)

_CALLS_PER_WORKER = 2
"""Calls of one runner in each worker: the next one is there when a worker has done one."""

_SECONDS_WITHOUT_WORKERS = 600.0


class Worker:
    """Ray actor that runs an `EncodingWorker` in its own process. The model is loaded by the first
    call.
    """

    def __init__(
        self, spec: ModelSpec, store: EmbeddingStore | None, device: str, threads: int
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self._made = spec, store, device
        self._worker: EncodingWorker | None = None

    def ready(self) -> RayembedError | None:
        """Return None once the model is loaded, or the error that prevented loading it."""
        try:
            self._loaded()
        except RayembedError as error:
            return error
        return None

    def do(self, call: Call, queries: Any = None, context: Any = None) -> Any:
        """Run the call and return its result; a rayembed error is returned, too, since Ray would
        wrap a raised one.
        """
        try:
            return do(self._loaded(), call, queries, context)
        except RayembedError as error:
            return error

    def _loaded(self) -> EncodingWorker:
        if self._worker is None:
            self._worker = EncodingWorker(*self._made)
        return self._worker


class RayPool:
    """Pool that distributes the calls of one evaluation task among the cluster's workers.

    A call whose worker dies is given to another one; the worker is used again when Ray has
    restarted it.
    """

    def __init__(self, workers: Sequence[Any], tries: int) -> None:
        self._workers, self._tries = list(workers), tries

    def share(self, vectors: np.ndarray) -> Any:
        """Put the array into Ray's object store and return its reference, which calls to workers
        resolve.
        """
        return ray.put(vectors)

    def run(
        self, calls: Iterable[Call], queries: Any = None, context: Any = None
    ) -> Iterator[tuple[Call, Any]]:
        """Run calls on the workers, and yield each call with its result as it finishes.

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
                loads, home = turn.loads(), number_of(call)
                # Of equal ones the bucket's own, so that runners begin with different workers.
                number = min(open_for, key=lambda n: (loads[n], (n - home) % len(self._workers)))
                reference = self._workers[number].do.remote(call, queries, context)
                turn.flying[reference] = number, call
            if not turn.flying:
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
    """State of one `run` of the pool: calls in progress by worker, restarting workers and lost
    workers.
    """

    workers: list[Any]
    most_tries: int
    flying: dict[Any, tuple[int, Call]] = field(default_factory=dict)
    """Reference → number of the worker and its call."""
    down: dict[Any, int] = field(default_factory=dict)
    """Reference of a `ready` that has not come back → number of the worker."""
    gone: set[int] = field(default_factory=set)
    tries: dict[int, int] = field(default_factory=dict)

    def open_for(self) -> list[int]:
        """Wait until a worker can accept a further call; return the numbers of such workers."""
        until = time.monotonic() + _SECONDS_WITHOUT_WORKERS
        while not (loads := self.loads()):
            if len(self.gone) == len(self.workers):
                raise WorkerError(
                    "all evaluation workers are gone. Restore the cluster's nodes and submit the "
                    "job again; finished embeddings are kept"
                )
            self._wait_for_any(until)
        return [number for number, calls in loads.items() if calls < _CALLS_PER_WORKER]

    def loads(self) -> dict[int, int]:
        """Map each usable worker to its number of calls in progress."""
        loads = dict.fromkeys(range(len(self.workers)), 0)
        for number, _ in self.flying.values():
            loads[number] += 1
        for number in (*self.down.values(), *self.gone):
            loads.pop(number, None)
        return loads

    def finished(self) -> Iterator[tuple[Call, Any]]:
        """Yield finished calls with their result, or with the error if their worker died."""
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
        """Return the failed call so that it is tried again; raise if it has failed too
        often.

        Raises:
            WorkerError: it has been tried often enough.
        """
        self.tries[id(call)] = self.tries.get(id(call), 0) + 1
        if self.tries[id(call)] >= self.most_tries:
            raise WorkerError(
                f"{self.most_tries} workers died while they embedded the same texts: {error}\nIf "
                "memory ran out, lower model.tokens_per_batch or placement.workers, or give the "
                "nodes more memory; submit the job again. Finished embeddings are kept."
            ) from error
        logger.warning("an evaluation worker died; its texts go to another worker")
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
        """Wait until a restarting worker is ready again; raise after the time limit. One that dies
        again and again while it loads the model comes back from every wait, so the time is that of
        all waits together.
        """
        left = until - time.monotonic()
        done = []
        if left > 0:
            done, _ = ray.wait(list(self.down), num_returns=1, timeout=left)
        if not done:
            raise WorkerError(
                f"no evaluation worker came back within {_SECONDS_WITHOUT_WORKERS:.0f} s. Submit "
                "the job again when the cluster has nodes; finished embeddings are kept"
            )
        for reference in done:
            self._back(reference)

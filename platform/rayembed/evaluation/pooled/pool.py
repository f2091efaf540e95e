"""Interface of a pool of evaluation workers, and the pool of a single worker."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rayembed.evaluation.pooled.embedding_store import EmbeddingBucket, TextUnit
from rayembed.evaluation.pooled.encoding_worker import (
    EncodingWorker,
    Found,
    PairScores,
    TopDocuments,
)
from rayembed.evaluation.pooled.rerank import QueryPairs, rerank

Call = TextUnit | TopDocuments | PairScores | QueryPairs
"""A unit to embed or to search in, or pairs for a cross-encoder."""


class Pool(Protocol):
    """Protocol of a pool of workers that have loaded the same model."""

    def share(self, vectors: np.ndarray) -> Any:
        """Put the array where every worker can read it; return the reference to pass to `run`."""
        ...

    def run(
        self, calls: Iterable[Call], queries: Any = None, context: Any = None
    ) -> Iterator[tuple[Call, Any]]:
        """Run calls (`EncodingWorker.embed` or `search`, or `rerank`), and yield each with its
        result as it finishes.

        Calls are taken from the iterable only when a worker is free to take them soon, so that what
        waits in memory is bounded by the number of workers.

        Args:
            queries: what `share` gave, for searches.
            context: what `share` gave of `packed` documents, where the calls name a context.
        """
        ...


class OneWorker:
    """Pool that has a single worker, in this process."""

    def __init__(self, worker: EncodingWorker) -> None:
        self.worker = worker

    def share(self, vectors: np.ndarray) -> np.ndarray:
        """Return the array itself."""
        return vectors

    def run(
        self, calls: Iterable[Call], queries: Any = None, context: Any = None
    ) -> Iterator[tuple[Call, Any]]:
        """Run the calls in order and yield each with its result."""
        for call in calls:
            yield call, do(self.worker, call, queries, context)


def number_of(call: Call) -> int:
    """Index of the call's bucket or query; it decides which worker gets the call."""
    return call.number if isinstance(call, QueryPairs) else _bucket_of(call).number


def _bucket_of(call: TextUnit | TopDocuments | PairScores) -> EmbeddingBucket:
    return call.bucket if isinstance(call, TextUnit) else call.unit.bucket


def do(
    worker: EncodingWorker, call: Call, queries: Any, context: np.ndarray | None = None
) -> np.ndarray | Found:
    """Execute the call on a worker: embed a unit of texts, or search in it."""
    if isinstance(call, QueryPairs):
        return rerank(call, worker.device)
    worker.learn(_bucket_of(call).encode_spec.context, context)
    return worker.embed(call) if isinstance(call, TextUnit) else worker.search(call, queries)


@dataclass(frozen=True)
class Workers:
    """Number of workers and the resources of each."""

    number: int = 1
    cpus: float = 1.0
    """CPUs reserved for each worker."""
    threads: int | None = None
    """Threads of torch in each worker; None: `cpus`, rounded down, at least 1."""
    gpu: bool = False
    """Whether each worker has a GPU."""
    tasks_at_once: int | None = None
    """Number of concurrent tasks; None: one more than workers, at most 8, so that no worker waits
    while a task computes its score."""
    tries: int = 5
    """Attempts for texts whose worker dies. Texts that waited for the same worker count too, since
    the cause of its death is unknown."""

    @property
    def runners(self) -> int:
        """Maximum number of tasks that run concurrently."""
        return self.tasks_at_once or min(self.number + 1, 8)

    @property
    def in_one_process(self) -> bool:
        """Whether one process both embeds and scores, because further processes would only share
        its cores. Beside a GPU they fit classifiers while it embeds.
        """
        return self.number == 1 and not self.gpu and self.tasks_at_once is None

    @property
    def torch_threads(self) -> int:
        """Number of torch threads in each worker."""
        return self.threads or max(1, int(self.cpus))

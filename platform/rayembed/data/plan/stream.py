"""A worker's input pipeline without Ray: a thread builds step batches ahead of use."""

import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.examples import with_examples
from rayembed.data.plan.step_batch import StepBatch, make_step_batch
from rayembed.models.contract import InContextTokenizer, Tokenizer

_SECONDS_BETWEEN_LOOKS = 0.1

_ENDING_SECONDS = 5.0
"""Seconds to wait for the thread at the end; a thread blocked in a read must not delay the error.
"""


def prefetched(
    make: Callable[[int], Any], first_step: int, num_steps: int, *, read_ahead: int = 4
) -> Generator[Any]:
    """Results of `make` for steps `first_step` to `num_steps` (exclusive), in order.

    Closing the iterator ends the thread.

    Args:
        read_ahead: steps that are ready before they are asked for.

    Raises:
        RayembedError: what `make` raises, after the steps before it.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=read_ahead)
    closed = threading.Event()

    def put(item: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for step in range(first_step, num_steps):
                if not put(make(step)):
                    return
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
            put(error)
        else:
            put(None)

    thread = threading.Thread(target=work, name="make-steps", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join(_ENDING_SECONDS)


@dataclass(frozen=True)
class PairSteps:
    """Builds one worker's batches of a plan by step number. Picklable."""

    plan: BatchPlan
    tokenizer: Tokenizer
    worker: int = 0
    num_workers: int = 1

    def __call__(self, step: int) -> StepBatch:
        """Batch of a step, counted from 0.

        Raises:
            DataError: workers that cannot share a batch equally, or a text without tokens.
            ArtifactError: a file of the plan is missing or broken.
        """
        records = self.plan.read(step, self.worker, self.num_workers)
        if isinstance(self.tokenizer, InContextTokenizer) and self.tokenizer.max_examples:
            first = self.worker * len(records)
            records = with_examples(self.plan, step, records, first, self.tokenizer)
        return make_step_batch(step, records, self.plan.num_negatives, self.tokenizer)

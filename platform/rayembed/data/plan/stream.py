"""A worker's step batches without Ray: a thread reads the plan and tokenises ahead."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.examples import with_examples
from rayembed.data.plan.step_batch import StepBatch, make_step_batch
from rayembed.models.contract import InContextTokenizer, Tokenizer

_SECONDS_BETWEEN_LOOKS = 0.1


def read_steps(
    plan: BatchPlan,
    tokenizer: Tokenizer,
    *,
    worker: int = 0,
    num_workers: int = 1,
    start_step: int = 0,
    read_ahead: int = 4,
) -> Iterator[StepBatch]:
    """One worker's batches from `start_step` to the plan's last step, in order.

    Closing the iterator ends the thread. An error of the thread is raised here, after the batches
    before it.

    Args:
        read_ahead: batches that are ready before they are asked for.

    Raises:
        DataError: workers that cannot share a batch equally, or a text without tokens.
        ArtifactError: a file of the plan is missing or broken.
    """
    ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(maxsize=read_ahead)
    closed = threading.Event()

    def put(item: StepBatch | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for step in range(start_step, plan.num_steps):
                if not put(one_step(plan, tokenizer, step, worker, num_workers)):
                    return
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
            put(error)
        else:
            put(None)

    thread = threading.Thread(target=work, name="read-steps", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()


@dataclass(frozen=True)
class PairSteps:
    """Makes a worker's batches by their step. Picklable: data workers call it."""

    plan: BatchPlan
    tokenizer: Tokenizer
    worker: int
    num_workers: int

    def __call__(self, step: int) -> StepBatch:
        """The batch of a step; raises as `read_steps`."""
        return one_step(self.plan, self.tokenizer, step, self.worker, self.num_workers)


def one_step(
    plan: BatchPlan, tokenizer: Tokenizer, step: int, worker: int, num_workers: int
) -> StepBatch:
    """The batch of one worker in one step."""
    records = plan.read(step, worker, num_workers)
    if isinstance(tokenizer, InContextTokenizer) and tokenizer.max_examples:
        records = with_examples(plan, step, records, worker * len(records), tokenizer)
    return make_step_batch(step, records, plan.num_negatives, tokenizer)

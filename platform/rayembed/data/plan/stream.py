"""A worker's input pipeline, in which a thread or processes build step batches before they are
needed.

Of a model that learns in context, examples stand in front of queries, as in bge-en-icl (arXiv
2409.15700): other pairs of the same global batch, so that they need no data of their own. They
depend on the plan, the step and the row's slot alone: every number of workers sees the same ones.
"""

import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rayembed.config.placement import Placement
from rayembed.data.hashes import text_hash
from rayembed.data.plan.batch_plan import TRAINING, BatchPlan, Pair
from rayembed.data.plan.step_batch import StepBatch, make_step_batch
from rayembed.data.records import Record
from rayembed.data.vectors.lookup import TeacherVectorLookup
from rayembed.data.words import same_text_form
from rayembed.machine.ahead import CannotSendError, done_ahead, done_by_processes
from rayembed.machine.cores import num_cores
from rayembed.machine.hardware import step_processes
from rayembed.models.contract import InContextTokenizer, Tokenizer, TrainableModel

logger = logging.getLogger(__name__)


def settled_step_processes(placement: Placement, model: TrainableModel) -> tuple[int, bool]:
    """Return how many processes build each worker's batches, and whether the settings state that
    number.
    """
    if placement.step_processes is not None:
        return placement.step_processes, True
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as Ray Train sets it
    device = "cuda" if placement.on_gpu else "cpu"
    return step_processes(device, model, num_cores() / workers_here), False


def prefetched(
    make: Callable[[int], Any],
    first_step: int,
    num_steps: int,
    processes: int = 0,
    asked: bool = True,
    *,
    read_ahead: int = 4,
) -> Generator[Any]:
    """Yield the results of `make` for the steps `first_step` to `num_steps` (exclusive) in order,
    computed in advance.

    Args:
        make: picklable where processes make the steps.
        processes: that make them; 0: a thread of this process. See `ahead`.
        asked: whether the run names that number; else a thread makes the steps of a `make` that
            cannot be sent to processes, which is warned of.
        read_ahead: results that a thread has ready.
    """
    steps = range(first_step, num_steps)
    if processes:
        try:
            yield from done_by_processes(
                make, steps, processes=processes, setting="placement.step_processes"
            )
        except CannotSendError as error:
            if asked:
                raise
            logger.warning("batches are made by a thread instead of processes: %s", error)
        else:
            return
    yield from done_ahead(make, steps, read_ahead=read_ahead)


@dataclass(frozen=True)
class PairSteps:
    """Builds the batches of one worker from a plan, given the number of the step. Picklable."""

    plan: BatchPlan
    tokenizer: Tokenizer
    worker: int = 0
    num_workers: int = 1
    num_positives: int = 1

    def __call__(self, step: int) -> StepBatch:
        """Build the batch of a step, counted from 0.

        Raises:
            DataError: workers that cannot share a batch equally, or a text without tokens.
            ArtifactError: a file of the plan is missing or broken.
        """
        records = self.plan.read(step, self.worker, self.num_workers, TRAINING)
        if isinstance(self.tokenizer, InContextTokenizer) and self.tokenizer.max_examples:
            first = self.worker * len(records)
            records = with_examples(self.plan, step, records, first, self.tokenizer)
        return make_step_batch(
            step,
            records,
            self.plan.num_negatives,
            self.tokenizer,
            self._teachers,
            self.num_positives,
        )

    @cached_property
    def _teachers(self) -> list[TeacherVectorLookup]:
        return [TeacherVectorLookup.open(folder) for folder in self.plan.teachers]


def with_examples(
    plan: BatchPlan,
    step: int,
    records: Sequence[Record],
    first_slot: int,
    tokenizer: InContextTokenizer,
) -> list[Record]:
    """Copy records, adding in-context examples from the same batch to the instruction of each
    query.

    A query gets from none to `max_examples` examples, uniformly distributed, drawn without
    replacement from the pairs of its data set with its instruction, as far as the tokenizer's
    budget allows. Its own text and its positives are never shown. A query without instruction has
    no template for examples and gets none.

    Args:
        first_slot: place of the first record in the global batch.
    """
    pairs = plan.read_pairs(step)
    return [
        _instructed(record, pairs, _random(plan, step, first_slot + place), tokenizer)
        for place, record in enumerate(records)
    ]


def _instructed(
    record: Record,
    pairs: Sequence[Pair],
    random: np.random.Generator,
    tokenizer: InContextTokenizer,
) -> Record:
    wanted = int(random.integers(tokenizer.max_examples + 1))
    task = (record.dataset, record.query_instruction)
    own = set(map(same_text_form, (record.query, *record.positives)))
    shown: dict[tuple[str, str], None] = {}  # equal pairs of several slots are one example
    for place in random.permutation(len(pairs)) if record.query_instruction else ():
        pair = pairs[place]
        if len(shown) == wanted:
            break
        if (pair.dataset, pair.query_instruction) == task and own.isdisjoint(
            map(same_text_form, (pair.query, *pair.positives))
        ):
            shown[pair.query, pair.positives[0]] = None
    told = tokenizer.instruct(record.query_instruction, list(shown))
    return replace(record, query_instruction=told)


def _random(plan: BatchPlan, step: int, slot: int) -> np.random.Generator:
    return np.random.default_rng([text_hash(plan.fingerprint) % 2**63, step, slot])

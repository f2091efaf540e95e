"""A worker's input pipeline on Ray: Ray Data actors build step batches ahead of use.

Training workers and their processes import this module but not cleaning, mining and sources, as
each of them waits for its imports.
"""

import logging
import pickle
from collections.abc import Callable, Generator, Iterator
from typing import Any

import ray.data
from ray.data import ActorPoolStrategy

from rayembed.errors import RayembedError

_STEPS_PER_TASK = 16
"""Consecutive steps that an actor builds in one task."""

_STEPS_PER_EXECUTION = 8192
"""Steps of one Ray Data execution. Ray takes 17 s to set up 20,000 tasks before the first batch;
starting new actors takes seconds too."""

_BLOCK_BYTES = 4 << 20
"""Block size in bytes. Small batches share a block, as each block costs Ray some milliseconds; a
large batch has its own."""

_BYTES_READ_AHEAD = 256 << 20
"""Maximum bytes of prefetched batches of one worker in the object store."""


def prefetched_on_ray(
    make: Callable[[int], Any], first_step: int, num_steps: int, *, processes: int
) -> Generator[Any]:
    """Results of `make` for steps `first_step` to `num_steps` (exclusive), in order.

    Ray Data actors build a few steps ahead on any CPUs. They reserve none, so that they run beside
    training workers that hold all CPUs of a small machine.

    Args:
        make: picklable, as `stream.PairSteps`; each actor has one copy of it, with what that has
            opened.
        processes: that make steps for this worker at the same time.

    Raises:
        RayembedError: what `make` raises.
    """
    for first in range(first_step, num_steps, _STEPS_PER_EXECUTION):
        last = min(first + _STEPS_PER_EXECUTION, num_steps)
        # Items, not ray.data.range: its read tasks would wait for a CPU that training holds.
        tasks = -(-(last - first) // _STEPS_PER_TASK)
        dataset = ray.data.from_items(list(range(first, last)), override_num_blocks=tasks)
        options = keep_order(dataset)
        dataset.context.target_max_block_size = _BLOCK_BYTES
        options.resource_limits = options.resource_limits.copy(
            object_store_memory=_BYTES_READ_AHEAD
        )
        made = dataset.map_batches(
            _StepActor,
            fn_constructor_args=(make,),
            batch_size=1,
            num_cpus=0,
            compute=ActorPoolStrategy(size=min(processes, tasks)),
        )
        yield from results(made)


class _StepActor:
    """Ray actor with the step builder and what it has opened: a tokenizer, Parquet footers."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"result": [result_or_error(self.make, int(step)) for step in batch["item"]]}


def result_or_error(make: Callable[..., Any], *arguments: Any) -> bytes:
    """Pickled result or rayembed error; if raised, Ray Data would keep only the error's text."""
    try:
        return pickle.dumps(make(*arguments))
    except RayembedError as error:
        return pickle.dumps(error)


def keep_order(dataset: Any) -> Any:
    """Ray Data options for ordered rows without progress output."""
    dataset.context.print_on_execution_start = False
    dataset.context.enable_progress_bars = False
    # It would warn that the bars are off.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    dataset.context.execution_options.preserve_order = True
    return dataset.context.execution_options


def results(dataset: Any) -> Iterator[Any]:
    """Results in order; rayembed errors from workers are raised with their own class."""
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, RayembedError):
            raise result
        yield result

"""Run preparation tasks in this process, and long ones in a small process pool."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from joblib import Parallel, delayed

from rayembed.data.engine.work_items import Needs, Result, Task
from rayembed.machine.cores import num_cores

_SECONDS_ALONE = 5.0
"""Seconds of work after which a process pool is started: its processes need about two for their
imports."""


def release_models() -> None:
    """Release the teacher and the cross-encoder that tasks keep loaded in this process.

    On a GPU their memory is what training has room for next.
    """
    from rayembed.data.mining.rescoring import release_cross_encoder
    from rayembed.data.vectors.teacher import release_teacher
    from rayembed.machine.hardware import release_memory

    release_teacher()
    release_cross_encoder()
    release_memory()


def execute_here(
    task: Task, items: Sequence[Any], needs: Needs = "cpu", *, use_gpu: bool = True
) -> Iterator[Result]:
    """Run a task on all items on this machine, and yield results in the items' order. An
    `Execute`.

    What needs a GPU or all cores is done in this process, item by item; the rest too, until it
    takes long enough for a pool of as many processes as there are CPUs.

    Args:
        use_gpu: whether a GPU that is there may be used.

    Raises:
        RayembedError: what the task raises.
    """
    if needs != "cpu":
        import torch

        device = ["cuda"] if use_gpu and torch.cuda.is_available() else []
        for item in items:
            yield task(item, *device)
        return
    waiting, began = deque(items), time.monotonic()
    processes = num_cores()
    while waiting and (
        processes == 1 or len(waiting) == 1 or time.monotonic() - began < _SECONDS_ALONE
    ):
        yield task(waiting.popleft())
    if waiting:
        with Parallel(min(processes, len(waiting)), return_as="generator") as pool:
            yield from pool(delayed(task)(item) for item in waiting)

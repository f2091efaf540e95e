"""Measure a model in a Ray task on the given resources."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray

from rayembed.config.placement import Placement
from rayembed.errors import WorkerError
from rayembed.machine.device import settled_placement
from rayembed.machine.gpu_check_on_ray import cluster_gpus

Measured = TypeVar("Measured")


def measured_on_ray(
    measure: Callable[..., Measured],
    reference: str | Path,
    *given: Any,
    placement: Placement,
    **options: Any,
) -> Measured:
    """Run `measure` on a model in a Ray task of the cluster; return its result. Waits for
    it.

    Args:
        measure: takes the reference, what is given, `device` and the options. Its results folder
            must be one that every node reads and writes, in object storage or on shared disks.
        placement: of which one worker's CPUs, threads and GPU are reserved.

    Raises:
        PlacementError: the placement asks for a GPU that no live node has.
        RayembedError: what `measure` raises, unwrapped from Ray's error.
        WorkerError: the task was lost, also when it was tried again.
    """
    placement = settled_placement(placement, cluster_gpus(placement), needed=1)
    task = ray.remote(
        num_cpus=placement.cpus_per_worker,
        num_gpus=1.0 if placement.on_gpu else 0.0,
        max_retries=2,
    )(_measure)
    options["device"] = "cuda" if placement.on_gpu else "cpu"
    try:
        found: Measured = ray.get(
            task.remote(placement.threads, measure, str(reference), *given, **options)
        )
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"the evaluation of {str(reference)!r} was lost with its process or node: {error}\nIf "
            "memory ran out, score fewer or shorter texts, or give the nodes more memory; then "
            "submit the run again under the same name. Stored scores are reused."
        ) from error
    return found


def _measure(
    threads: int, measure: Callable[..., Measured], *given: Any, **options: Any
) -> Measured:
    import torch

    # Ray shows a task's output in the job's log: a line when a task of the benchmark is scored.
    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("rayembed").setLevel(logging.INFO)
    torch.set_num_threads(threads)
    return measure(*given, **options)

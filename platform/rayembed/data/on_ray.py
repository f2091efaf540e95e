"""Preparation on Ray: its steps run as Ray Data pipelines, all over the cluster.

What is done stands in `prepare` and `units`; here is only who does it.
"""

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import ray
import ray.data
from ray.autoscaler import sdk as ray_sdk
from ray.data import ActorPoolStrategy

from rayembed.config.adaptation import Adaptation
from rayembed.config.backbone import Dtype
from rayembed.config.data_run import DataRun, TeacherPlacement, data_of
from rayembed.config.run import Run
from rayembed.data.plan.on_ray import keep_order, result_or_error, results
from rayembed.data.prepare import prepare
from rayembed.data.prepared import Workshop
from rayembed.data.sequences.prepare import prepare_sequences
from rayembed.data.sequences.texts import FoundTexts
from rayembed.data.units import Needs, Result, Task
from rayembed.data.vectors.teacher import Teaching
from rayembed.errors import PlacementError
from rayembed.hardware import Precision, auto_precision

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
"""Between two looks for a GPU that was asked for."""

_SOME_GPU = 0.01
"""What a question to a GPU reserves of it."""


_GPUS_THERE_ARE = TeacherPlacement()


def workshop_on_ray(run: DataRun) -> Workshop:
    """What preparation is given to do its work all over the cluster.

    The run's storage must be readable and writable on all machines.
    """
    execute = partial(execute_with_ray_data, placement=run.placement)
    teaching = Teaching(dtype=cache(partial(_teachers_dtype, run.placement)))
    return Workshop(run.placement.storage_path, run.seed, execute, teaching, run.data.root)


def _teachers_dtype(placement: TeacherPlacement) -> Dtype:
    """What `auto` means on the machines that run teachers, said in one line.

    Of GPUs that are still to come it is not asked: every one since Ampere computes bfloat16.
    """
    if not _gpus() and placement.gpus:
        return "bfloat16"
    task, device = ray.remote(num_cpus=0)(auto_precision), "cpu"
    if _gpus():
        task, device = ray.remote(num_cpus=0, num_gpus=_SOME_GPU)(auto_precision), "cuda"
    precision: Precision = ray.get(task.remote(device))
    logger.info("teachers' dtype auto is %s", precision)
    return precision.dtype


def prepare_data(run: Run) -> dict[str, str]:
    """Stage name → folder of its finished batch plan; see `prepare`.

    Raises:
        ConfigError, DataError: as `prepare`, also from within Ray's workers.
    """
    return prepare(run, workshop_on_ray(data_of(run)))


def prepare_corpus(run: Adaptation, found: Sequence[FoundTexts]) -> str:
    """The folder of an adaptation's finished plan; see `prepare_sequences`."""
    storage = run.placement.storage_path
    return prepare_sequences(run, Workshop(storage, run.seed, execute_with_ray_data), found)


def execute_with_ray_data(
    task: Task,
    units: Sequence[Any],
    needs: Needs,
    *,
    placement: TeacherPlacement = _GPUS_THERE_ARE,
) -> Iterator[Result]:
    """Results of the units in their order: an `Execute` that runs them all over the cluster.

    Raises:
        PlacementError: none of the GPUs that the placement names came.
        RayembedError: what the task raises.
    """
    rows = [{"unit": ray.cloudpickle.dumps(unit)} for unit in units]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    keep_order(dataset)
    gpus = 0 if needs == "cpu" else gpus_for(placement)
    if gpus or needs == "gpu or machine":
        machines = max(1, sum(_cpus(node) >= 1 for node in ray.nodes()))
        made = dataset.map_batches(
            _TaskActor,
            fn_constructor_args=(task, *(["cuda"] if gpus else [])),
            batch_size=1,
            compute=ActorPoolStrategy(min_size=1, max_size=min(gpus or machines, len(rows))),
            num_gpus=1 if gpus else 0,
            num_cpus=0 if gpus else 1,
        )
    else:
        made = dataset.map_batches(_run_task, fn_args=(task,), batch_size=1)
    yield from results(made)


def gpus_for(
    placement: TeacherPlacement,
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """How many GPUs may work for teachers: those there are, or all that are asked for.

    It waits until the first of them is there; Ray Data asks for the others while it works.

    Raises:
        PlacementError: `placement.gpus` names some, and none is there in the end.
    """
    wanted, seconds = placement.gpus, placement.wait_for_nodes_seconds
    if not wanted or _gpus():
        return max(wanted, _gpus()) if seconds else _gpus()
    if seconds:
        logger.info("waiting up to %g s for GPUs, of which teachers may use %d", seconds, wanted)
    deadline = clock() + seconds
    # Without a request no node with GPUs would come: nothing that runs has asked for one yet.
    ray_sdk.request_resources(bundles=[{"GPU": 1.0}] * wanted)
    try:
        while not _gpus() and clock() < deadline:
            sleep(min(_POLL_SECONDS, seconds))
    finally:
        ray_sdk.request_resources(bundles=[])
    if not _gpus():
        raise PlacementError(
            f"placement.gpus={wanted} for teachers: no node has a GPU after {seconds:g} s. Raise "
            "placement.wait_for_nodes_seconds on a cluster that adds nodes, add nodes with GPUs, "
            "or set placement.gpus=0 in a data job (placement.use_gpu=false in a training job) "
            "to work on CPUs"
        )
    return max(wanted, _gpus())


def _gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def _cpus(node: Mapping[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0)) if node["Alive"] else 0.0


class _TaskActor:
    """Keeps a process, and with it the model that the task loads into it."""

    def __init__(self, task: Task, *device: str) -> None:
        self.task, self.device = task, device

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return _run_task(batch, self.task, *self.device)


def _run_task(batch: dict[str, Any], task: Task, *device: str) -> dict[str, list[bytes]]:
    units = [pickle.loads(unit) for unit in batch["unit"]]
    return {"result": [result_or_error(task, unit, *device) for unit in units]}

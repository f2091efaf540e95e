"""Data on Ray: preparation runs as Ray Data pipelines, workers stream their steps by Ray Data.

What is done stands in `prepare`, `units` and `stream`; here is only who does it.
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
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.step_batch import StepBatch
from rayembed.data.plan.stream import PairSteps
from rayembed.data.prepare import prepare
from rayembed.data.prepared import Workshop
from rayembed.data.sequences.prepare import prepare_sequences
from rayembed.data.sequences.texts import FoundTexts
from rayembed.data.units import Needs, Result, Task
from rayembed.data.vectors.teacher import Teaching
from rayembed.errors import PlacementError, RayembedError
from rayembed.hardware import Precision, auto_precision
from rayembed.models.contract import Tokenizer

logger = logging.getLogger(__name__)

_ACTORS = 2
"""That make batches of one worker at the same time."""

_POLL_SECONDS = 2.0
"""Between two looks for a GPU that was asked for."""

_STEPS_PER_TASK = 16
"""An actor's one after the other."""

_STEPS_PER_EXECUTION = 8192
"""20,000 tasks take Ray 17 s to set up before the first batch, and new actors take seconds too."""

_SOME_GPU = 0.01
"""What a question to a GPU reserves of it."""

_BLOCK_BYTES = 4 << 20
"""Small batches come together, as every block costs Ray some milliseconds; large ones alone."""

_BYTES_READ_AHEAD = 256 << 20
"""Of batches that wait in the object store, for each worker."""


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
    _keep_order(dataset)
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
    yield from _results(made)


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


def stream_steps(
    plan_folder: str,
    tokenizer: Tokenizer,
    *,
    worker: int = 0,
    num_workers: int = 1,
    start_step: int = 0,
) -> Iterator[StepBatch]:
    """One worker's batches from `start_step` to the plan's last step, in order; see `stream_made`.

    Raises:
        DataError, ArtifactError: as `stream.read_steps`.
    """
    plan = BatchPlan.open(plan_folder)
    make = PairSteps(plan, tokenizer, worker, num_workers)
    yield from stream_made(make, start_step, plan.num_steps)


def stream_made(make: Callable[[int], Any], first_step: int, num_steps: int) -> Iterator[Any]:
    """What `make` gives for each step from `first_step` up to `num_steps`, in order.

    Ray Data's actors make a few steps ahead on whatever CPUs there are. They reserve none, so that
    they run beside training workers that hold all CPUs of a small machine.

    Args:
        make: picklable; each actor has one copy of it, with what that has opened.

    Raises:
        RayembedError: what `make` raises.
    """
    for first in range(first_step, num_steps, _STEPS_PER_EXECUTION):
        last = min(first + _STEPS_PER_EXECUTION, num_steps)
        # Items, not ray.data.range: its read tasks would wait for a CPU that training holds.
        tasks = -(-(last - first) // _STEPS_PER_TASK)
        dataset = ray.data.from_items(list(range(first, last)), override_num_blocks=tasks)
        options = _keep_order(dataset)
        dataset.context.target_max_block_size = _BLOCK_BYTES
        options.resource_limits = options.resource_limits.copy(
            object_store_memory=_BYTES_READ_AHEAD
        )
        made = dataset.map_batches(
            _StepActor,
            fn_constructor_args=(make,),
            batch_size=1,
            num_cpus=0,
            compute=ActorPoolStrategy(size=min(_ACTORS, tasks)),
        )
        yield from _results(made)


class _TaskActor:
    """Keeps a process, and with it the model that the task loads into it."""

    def __init__(self, task: Task, *device: str) -> None:
        self.task, self.device = task, device

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return _run_task(batch, self.task, *self.device)


def _run_task(batch: dict[str, Any], task: Task, *device: str) -> dict[str, list[bytes]]:
    units = [pickle.loads(unit) for unit in batch["unit"]]
    return {"result": [_result_or_error(task, unit, *device) for unit in units]}


class _StepActor:
    """Keeps what makes steps, with what it has opened: a tokenizer, the footer of a file."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"result": [_result_or_error(self.make, int(step)) for step in batch["item"]]}


def _result_or_error(make: Callable[..., Any], *arguments: Any) -> bytes:
    """What is made, pickled, or an error of ours as a value: raised, Ray Data would keep only its
    text.
    """
    try:
        return pickle.dumps(make(*arguments))
    except RayembedError as error:
        return pickle.dumps(error)


def _keep_order(dataset: Any) -> Any:
    """The execution options of the data set, whose rows will come in order and without noise."""
    dataset.context.print_on_execution_start = False
    dataset.context.enable_progress_bars = False
    # It would warn that the bars are off.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    dataset.context.execution_options.preserve_order = True
    return dataset.context.execution_options


def _results(dataset: Any) -> Iterator[Any]:
    """The results in order; an error of ours in a worker is raised as itself."""
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, RayembedError):
            raise result
        yield result

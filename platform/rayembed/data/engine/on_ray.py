"""Run preparation steps as Ray Data pipelines over the whole cluster.

`prepare` and `work_items` define the work; this module only runs it.
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

from rayembed.config.data_run import DataRun, TeacherPlacement
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.watch_on_ray import Guard, next_units, watching
from rayembed.data.engine.work_items import Needs, Result, Task
from rayembed.data.vectors.teacher import TeacherLoader, load_teacher
from rayembed.display.progress import doing, present_listener
from rayembed.errors import PlacementError, RayembedError
from rayembed.machine.hardware import Precision, auto_precision
from rayembed.models.versions import versions

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
"""Seconds between two checks for a requested GPU."""

_SOME_GPU = 0.01
"""Fraction of a GPU that a query about its properties reserves."""

_ANSWER_SECONDS = 60
"""Timeout in seconds for a node to report its number type."""

_GPUS_THERE_ARE = TeacherPlacement()


def ray_pipeline_context(run: DataRun) -> PipelineContext:
    """Make the context with which data preparation runs its tasks on the whole cluster.

    The run's storage must be readable and writable on all machines.
    """
    execute = partial(execute_with_ray_data, placement=run.placement)
    load = partial(load_teacher, began=versions())
    precision = cache(partial(_teachers_precision, run.placement))
    teacher_loader = TeacherLoader(load, precision=precision)
    return PipelineContext(
        run.placement.storage_path, run.seed, execute, teacher_loader, run.data.root
    )


def _teachers_precision(placement: TeacherPlacement) -> Precision:
    """Choose the number type that is fast on the nodes that run teachers.

    GPUs that have not joined yet are not checked.
    """
    if placement.use_gpu and _gpus():
        return node_precision("cuda", {"CPU": 0, "GPU": _SOME_GPU})
    if placement.gpus:
        return Precision("bfloat16", "GPU nodes will join, and all GPUs since Ampere support it")
    return node_precision("cpu", {"CPU": 1})


def node_precision(device: str, wanted: Mapping[str, float]) -> Precision:
    """Return the number type that is fast on a node with these free resources, by a Ray task on
    that node.

    Where there is none for a while (nodes that are still to come) it is what this machine takes.

    Args:
        wanted: amounts by Ray's names of resources, of which the CPUs are stated.
    """
    found = remote_with(wanted, auto_precision).remote(device)
    try:
        precision: Precision = ray.get(found, timeout=_ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(found)
        precision = auto_precision(device)
        logger.warning(
            "no node had the resources %s free within %d s to report its fastest number type; "
            "using the number type of this machine instead: %s",
            *(dict(wanted), _ANSWER_SECONDS, precision),
        )
    return precision


def remote_with(wanted: Mapping[str, float], function: Callable[..., Any]) -> Any:
    """Wrap a function as a Ray remote function that reserves the given resources."""
    others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    reserved = {"num_cpus": wanted["CPU"], "num_gpus": wanted.get("GPU", 0)}
    return ray.remote(**reserved, **({"resources": others} if others else {}))(function)


def execute_with_ray_data(
    task: Task,
    items: Sequence[Any],
    needs: Needs,
    *,
    placement: TeacherPlacement = _GPUS_THERE_ARE,
) -> Iterator[Result]:
    """Run a task on all items over the cluster, and yield results in the items' order. An
    `Execute`.

    A process that takes longer than `placement.unit_seconds` for a unit is ended, and another one
    runs the unit.

    Raises:
        PlacementError: none of the GPUs that the placement names came.
        WorkerError: a unit took too long in several processes; the message names it.
        RayembedError: what the task raises.
    """
    gpus = 0 if needs == "cpu" or not placement.use_gpu else gpus_for(placement)
    machines = max(1, sum(_cpus(node) >= 1 for node in ray.nodes()))
    processes = (gpus or machines) if gpus or needs == "gpu or machine" else None
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    numbered, first, seconds = list(enumerate(items)), 0, None
    with watching(placement.unit_seconds, present_listener()) as guard:
        while first < len(numbered):
            left = len(numbered) - first
            # Those that keep a process would load their model again in each execution.
            count, each = (left, 1) if processes else next_units(left, cpus, seconds)
            groups = [numbered[i : i + each] for i in range(first, first + count, each)]
            first += count
            spent = 0.0
            done = _results(_execution(guard, task, groups, processes, bool(gpus)))
            for results, group_seconds in done:
                spent += group_seconds
                yield from results
            seconds = spent / count


def _execution(
    guard: Guard, task: Task, groups: Sequence[Any], processes: int | None, on_gpus: bool
) -> Any:
    """Build the Ray Data pipeline that runs groups of numbered units, each group as one
    row.

    Args:
        processes: that are kept alive, on a GPU or a machine each; None: tasks on any CPU.
    """
    rows = [{"units": ray.cloudpickle.dumps(group)} for group in groups]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    _keep_order(dataset)
    if processes is None:
        return dataset.map_batches(_run_group, fn_args=(guard, task), batch_size=1)
    return dataset.map_batches(
        _TaskActor,
        fn_constructor_args=(guard, task, *(["cuda"] if on_gpus else [])),
        batch_size=1,
        compute=ActorPoolStrategy(min_size=1, max_size=min(processes, len(rows))),
        num_gpus=1 if on_gpus else 0,
        num_cpus=0 if on_gpus else 1,
    )


def gpus_for(
    placement: TeacherPlacement,
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Number of GPUs for teachers: the cluster's GPUs, or as many as autoscaling may add.

    Waits until the first of them is available; Ray Data requests the others during the work.

    Raises:
        PlacementError: `placement.gpus` names some, and none is there in the end.
    """
    wanted, seconds = placement.gpus, placement.wait_for_nodes_seconds
    if not wanted or _gpus():
        return max(wanted, _gpus()) if seconds else _gpus()
    if seconds:
        logger.info(
            "waiting up to %g s for GPUs to join the cluster; teachers may use up to %d",
            seconds,
            wanted,
        )
    deadline = clock() + seconds
    # Without a request no node with GPUs would come: nothing that runs has asked for one yet.
    ray_sdk.request_resources(bundles=[{"GPU": 1.0}] * wanted)
    try:
        with doing("waiting for a GPU for teachers"):
            while not _gpus() and clock() < deadline:
                sleep(min(_POLL_SECONDS, seconds))
    finally:
        ray_sdk.request_resources(bundles=[])
    if not _gpus():
        raise PlacementError(
            f"placement.gpus={wanted} requests GPUs for teachers, but no node has a GPU after "
            f"{seconds:g} s. Raise placement.wait_for_nodes_seconds on a cluster that adds nodes, "
            "add nodes with GPUs, or set placement.use_gpu=false (and placement.gpus=0 in a data "
            "job) to compute on CPUs"
        )
    return max(wanted, _gpus())


def _gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def _cpus(node: Mapping[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0)) if node["Alive"] else 0.0


class _TaskActor:
    """Ray actor that runs a task on many groups, so that the model that the task loads stays in
    memory.
    """

    def __init__(self, guard: Guard, task: Task, *device: str) -> None:
        self.guard, self.task, self.device = guard, task, device

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return _run_group(batch, self.guard, self.task, *self.device)


def _run_group(
    batch: dict[str, Any], guard: Guard, task: Task, *device: str
) -> dict[str, list[bytes]]:
    def run(units: list[tuple[int, Any]]) -> tuple[list[Result], float]:
        began = time.monotonic()
        done = [task(item, *device) for item in guard.watched(units)]
        return done, time.monotonic() - began

    return {"result": [_result_or_error(run, pickle.loads(units)) for units in batch["units"]]}


def _result_or_error(make: Callable[..., Any], *arguments: Any) -> bytes:
    """Return the pickled result, or the pickled rayembed error, since Ray Data keeps only the text
    of raised errors.
    """
    try:
        return pickle.dumps(make(*arguments))
    except RayembedError as error:
        return pickle.dumps(error)


def _keep_order(dataset: Any) -> Any:
    """Set the Ray Data options that keep rows in order and hide progress bars."""
    dataset.context.print_on_execution_start = False
    dataset.context.enable_progress_bars = False
    # It would warn that the bars are off.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    dataset.context.execution_options.preserve_order = True
    return dataset.context.execution_options


def _results(dataset: Any) -> Iterator[Any]:
    """Yield the results in order; raise rayembed errors of workers with their own class."""
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, RayembedError):
            raise result
        yield result

"""Train stages with Ray Train: start and restart workers, and collect their metrics in a small
actor.

This is the driver's side; `train_function_on_ray.py` has what runs in each worker.
"""

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayembed.assets.storage import is_remote, join, open_storage_for_ray
from rayembed.config.document import NamedRun
from rayembed.config.evaluation import EvaluationPlacement
from rayembed.config.placement import Placement
from rayembed.data.engine.on_ray import node_precision, remote_with
from rayembed.display.progress import doing
from rayembed.errors import PlacementError, WorkerError
from rayembed.machine.gpu_check_on_ray import gpu_problems, live_nodes
from rayembed.machine.hardware import Precision
from rayembed.registry.provenance import node_hardware
from rayembed.training.checkpoints.checkpoint_list import CHECKPOINTS, repair_checkpoint_list
from rayembed.training.faults.elastic_on_ray import (
    START_SECONDS,
    ElasticTrainer,
    StoppableTrainer,
    end_with_checkpoint,
)
from rayembed.training.faults.failures_on_ray import (
    AGAIN,
    Torch,
    cause,
    failure_callbacks,
    failure_config,
    killed_for_memory,
    reason,
)
from rayembed.training.job import Job
from rayembed.training.memory.capacity import (
    Node,
    await_capacity,
    check_validation_capacity,
    kind_resource,
    worker_resources,
    workers_that_fit,
)
from rayembed.training.metrics_sink import MetricsSink
from rayembed.training.progress import Progress
from rayembed.training.train_function_on_ray import LOG_LEVEL, train_function, worker_environment
from rayembed.training.validation.on_ray import ValidationOnRay
from rayembed.training.validation.scoring import Validation

logger = logging.getLogger(__name__)

CONTROLLER_DEATHS = 3
"""Maximum deaths of Train's controller before the run fails."""

_ANSWER_SECONDS = 5.0

_WORKER_START_SECONDS = 60
"""Ray Train's default worker start timeout in seconds."""


def check_placement_now(placement: Placement, *, validates: bool = False) -> None:
    """Check that the nodes can hold the workers before data is prepared; do nothing if the run
    waits for nodes later.

    GPU nodes that came now would stand idle, or be gone again, when the data is there. The GPUs
    of the others are checked where the run's device is settled: `cluster_gpus`.
    """
    if not placement.wait_for_nodes_seconds:
        check_placement(placement, validates=validates)


def check_placement(placement: Placement, *, validates: bool = False, runs: int = 1) -> None:
    """Check that the cluster's nodes can hold the run's workers; wait for nodes if the placement
    says so.

    Args:
        validates: whether a node must hold a validation task too, beside them or after them.
        runs: how many such runs are waited for at a time; one is enough in the end.

    Raises:
        PlacementError: too few or too small nodes; says what was asked and what is there.
    """
    await_capacity(placement, _nodes, _request_nodes, runs=runs)
    if validates:
        check_validation_capacity(placement, _nodes())


def check_ready(placement: Placement, *, validates: bool = False) -> None:
    """Check nodes again once the data is prepared, and the GPUs of nodes that have joined since."""
    check_placement(placement, validates=validates)
    if placement.wait_for_nodes_seconds:
        check_gpus(placement)


def check_gpus(placement: Placement) -> None:
    """Check that torch computes correctly on the GPUs of all nodes that can hold workers; see
    `gpu_problems`.

    Raises:
        PlacementError: what is wrong with which nodes, and what to do.
    """
    if not placement.on_gpu:
        return
    if told := list(dict.fromkeys(gpu_problems(placement.gpu).values())):
        raise PlacementError(f"{'; '.join(told)}; or train on CPUs (placement.use_gpu=false)")


def _nodes() -> list[Node]:
    return [node["Resources"] for node in live_nodes()]


def _request_nodes(bundles: list[dict[str, float]]) -> None:
    request_resources(bundles=bundles)


def _one_worker(placement: Placement | EvaluationPlacement) -> dict[str, float]:
    """Return the resources of one worker, with its kind of GPU, so that a task runs on a node that
    workers may use.
    """
    resources = worker_resources(placement)
    named = getattr(placement, "gpu", None) is not None
    return resources | kind_resource(placement, _nodes()) if named else resources


def worker_precision(placement: Placement | EvaluationPlacement) -> Precision:
    """Return the number type that `auto` selects on a node with room for a worker; see
    `node_precision`.
    """
    return node_precision("cuda" if placement.on_gpu else "cpu", _one_worker(placement))


def worker_hardware(placement: Placement) -> dict[str, Any] | None:
    """Describe the hardware of a node with room for a worker (`node_hardware`); None if no node
    answered in time.
    """
    wanted = _one_worker(placement)
    task = remote_with(wanted, node_hardware)
    found = task.remote()
    try:
        answer: dict[str, Any] = ray.get(found, timeout=_WORKER_START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(found)
        logger.warning(
            "no node had %s free for %d s, so the run's hardware is not recorded",
            *(wanted, _WORKER_START_SECONDS),
        )
        return None
    return answer


def train_on_ray(
    job: Job,
    folder: str,
    metrics_log: Path,
    offset: int,
    *,
    metrics_place: str | None = None,
    validation: Validation | None = None,
) -> None:
    """Train with Ray Train until the job's weights are in storage; do nothing if they are there
    already.

    Args:
        folder: the stage's folder in storage, for Ray Train's checkpoints.
        metrics_log: file on this machine that gets a line a step.
        offset: steps of the stages before.
        metrics_place: where the log is copied to whenever a checkpoint counts; None: nowhere.
        validation: how weights are scored when `job.validated_in` is set.

    Raises:
        RayembedError: what a worker raised, if it is one of ours.
        PlacementError: the workers could not be started.
        WorkerError: workers failed more often than `placement.max_failures`.
    """
    if job.is_done():
        logger.info("stage %s is done; its weights: %s", job.stage.name, job.weights)
        return
    trainer, sink = _trainer(job, folder, metrics_log, offset, metrics_place)
    if job.validated_in is None:
        _fit(trainer, sink, job, folder, metrics_log)
        return
    assert validation is not None
    with ValidationOnRay(job.run, job.number, job.validated_in, validation) as scored:
        _fit(trainer, sink, job, folder, metrics_log)
    scored.finish(job.weights)


def _trainer(
    job: Job, folder: str, metrics_log: Path, offset: int, metrics_place: str | None
) -> tuple[StoppableTrainer, Any]:
    """Make the Ray Train trainer of the job, and the actor that receives its metrics."""
    placement = job.placement
    _wait_for_workers(placement)
    # A worker that is stopped answers nobody: Train's controller sees what the others raised when
    # it gives that one up, which by itself it does after ten minutes.
    patience = str(placement.collective_timeout_seconds)
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", patience)
    _fetch(job)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(MetricsSink)
    sink = actor.remote(str(metrics_log), metrics_place)
    filesystem, path = open_storage_for_ray(folder)
    workers = placement.fewest_workers, placement.workers
    make = partial(ElasticTrainer, job=job) if placement.is_elastic else StoppableTrainer
    trainer = make(
        train_function,
        train_loop_config={
            "job": job,
            "sink": sink,
            "offset": offset,
            "memory": join(folder, CHECKPOINTS),
        },
        torch_config=Torch(
            backend="nccl" if placement.on_gpu else "gloo",
            timeout_s=math.ceil(placement.collective_timeout_seconds),
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers if placement.is_elastic else placement.workers,
            use_gpu=placement.on_gpu,
            resources_per_worker=_one_worker(placement),
            elastic_resize_monitor_interval_s=placement.resize_interval_seconds,
        ),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            storage_path=path,
            storage_filesystem=filesystem if is_remote(folder) else None,
            failure_config=failure_config(placement),
            # The newest: the one before is there when the last one turns out to be damaged.
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=placement.keep_checkpoints),
            callbacks=failure_callbacks(job),
            worker_runtime_env={"env_vars": worker_environment(placement)},
            logging_config=ray.train.LoggingConfig(log_level=LOG_LEVEL),
        ),
    )
    return trainer, sink


def _fit(trainer: StoppableTrainer, sink: Any, job: Job, folder: str, metrics_log: Path) -> None:
    with Progress(job.stage, metrics_log):
        try:
            _train_to_the_end(trainer, job, join(folder, CHECKPOINTS))
        except KeyboardInterrupt:
            end_with_checkpoint(trainer, sink, job.stage.name)
            raise
        except WorkerError as error:
            hang = _hang(sink)
            if not hang:
                raise
            raise WorkerError(f"{error}\nBefore that, {hang}") from error
        finally:
            ray.kill(sink)


def _train_to_the_end(trainer: StoppableTrainer, job: Job, checkpoints: str) -> None:
    """Run the trainer to its end; restart Ray Train's controller if it dies.

    Train starts workers again by itself, but nobody its controller, with which the workers go.
    """
    for restarts_left in reversed(range(CONTROLLER_DEATHS + 1)):
        repair_checkpoint_list(checkpoints)
        try:
            trainer.fit()
            return
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            # Where memory is full, Ray kills the newest of its processes, small ones among them.
            if not restarts_left:
                raise WorkerError(
                    f"stage {job.stage.name!r}: Ray Train's controller died "
                    f"{CONTROLLER_DEATHS + 1} times; cause of the last death: "
                    f"{error}\n{AGAIN}"
                ) from error
            logger.warning(
                "stage %s: Ray Train's controller has died; a new controller resumes from the last "
                "checkpoint. %s",
                job.stage.name,
                killed_for_memory(str(error)) or f"Ray says: {reason(error)}",
            )
        except ray.train.v2.api.exceptions.TrainingFailedError as error:
            # A checkpoint that was damaged since the start stops workers that would go on from it.
            if not (repair_checkpoint_list(checkpoints) and restarts_left):
                raise cause(error, job) from error


def _hang(sink: Any) -> str:
    """Describe the workers that wait and the workers they wait for, if any reported a hang; else
    return an empty text.
    """
    try:
        return str(ray.get(sink.hang.remote(), timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError:
        return ""


def _wait_for_workers(placement: Placement) -> None:
    """Set Ray Train's waiting time for nodes that were lost during data preparation.

    An elastic run waits before it starts workers; then their places are free or never will be.
    """
    seconds = START_SECONDS if placement.is_elastic else placement.wait_for_nodes_seconds
    if placement.is_elastic or seconds > _WORKER_START_SECONDS:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(seconds))


def _fetch(job: Job) -> None:
    """Download pretrained models and teachers' vectors to each node that can hold a worker, before
    the workers start.

    A node that fetched them in its worker could outlast the time limit of the others' collective.
    """
    nodes = [
        node["NodeID"]
        for node in live_nodes()
        if workers_that_fit(job.placement, [node["Resources"]])
    ]
    if len(nodes) > 1:
        logger.info(
            "fetching the model %s on each of %d nodes", " and ".join(job.pretrained), len(nodes)
        )
    # Soft: on a node that has gone meanwhile nobody needs it.
    places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
    fetch = ray.remote(num_cpus=0, max_retries=2)(_fetch_here)
    _wait_for(
        [fetch.options(scheduling_strategy=place).remote(job) for place in places],
        f"fetching {' and '.join(map(repr, job.pretrained))} to a node",
        "Give the nodes more memory if it fails again.",
    )


def _fetch_here(job: Job) -> None:
    job.fetch()


def export_on_ray(
    export: Callable[..., None], run: NamedRun, weights: str | None, folder: str
) -> None:
    """Run `export(run, weights, folder)`, which writes a model to storage, in a Ray task.

    A task on any node writes it, because it needs memory for the whole model.

    Args:
        weights: path of trained weights in storage; None: the model is untrained.

    Raises:
        RayembedError: what `export` raises, unwrapped from Ray's error.
        WorkerError: the task was lost, also when it was tried again.
    """
    task = ray.remote(num_cpus=run.placement.cpus_per_worker, max_retries=2)(export)
    _wait_for(
        [task.remote(run, weights, folder)],
        f"the export of {folder!r}",
        "It needs memory for the whole model on one node: give the nodes more of it, or lower what "
        "runs beside it.",
    )


def _wait_for(tasks: list[Any], what: str, advice: str) -> None:
    """Wait for Ray tasks; raise their own errors without Ray's wrapper, and WorkerError if a task
    was lost.
    """
    try:
        with doing(what):
            ray.get(tasks)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"{what} was lost with its process or node: {error}\n{advice} Submit the run again "
            "under the same name to resume it."
        ) from error

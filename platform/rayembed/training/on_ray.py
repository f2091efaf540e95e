"""Stages as Ray Train runs: workers, restarts, checkpoints; metrics through one small actor."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from ray.autoscaler.sdk import request_resources
from ray.train import UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import (
    InsufficientClusterResourcesError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import is_remote, open_storage, write_atomic
from rayembed.config.run import Placement, Run
from rayembed.data.on_ray import stream_steps
from rayembed.data.plan.step_batch import StepBatch
from rayembed.errors import PlacementError, RayembedError, WorkerError
from rayembed.models.contract import Tokenizer
from rayembed.registry.metrics_log import MetricsLog
from rayembed.registry.provenance import node_hardware
from rayembed.training.capacity import (
    Node,
    await_capacity,
    worker_resources,
    workers_that_fit,
)
from rayembed.training.export import export
from rayembed.training.loop import StepRecord
from rayembed.training.progress import Progress
from rayembed.training.worker import StageJob, Surroundings, is_done, train_stage

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_SECONDS = 600
CONTROLLER_FAILURES = 3
"""Starts of a worker group that may fail before the run does; Ray's own default is no limit."""

_NOT_STARTED = (
    InsufficientClusterResourcesError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)

_WORKER_START_SECONDS = 60
"""That Train waits for the CPUs and GPUs of its workers by default."""


_LOG_LEVEL = "WARNING"


def check_placement(placement: Placement) -> None:
    """Return when the cluster's nodes can hold the run's workers; it may wait for nodes to come.

    Raises:
        PlacementError: too few or too small nodes; says what was asked and what is there.
    """
    await_capacity(placement, _nodes, _request_nodes)


def _nodes() -> list[Node]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _request_nodes(bundles: list[dict[str, float]]) -> None:
    request_resources(bundles=bundles)


def worker_hardware(placement: Placement) -> dict[str, Any] | None:
    """`node_hardware` of a node that has room for a worker; None: there was none for a while."""
    wanted = worker_resources(placement)
    task = ray.remote(num_cpus=wanted["CPU"], num_gpus=wanted.get("GPU", 0))(node_hardware)
    found = task.remote()
    try:
        answer: dict[str, Any] = ray.get(found, timeout=_WORKER_START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(found)
        logger.warning(
            "no node had %s free for %d s: the run's hardware is not recorded",
            *(wanted, _WORKER_START_SECONDS),
        )
        return None
    return answer


class _OursAtOnce(UserCallback):  # type: ignore[misc]  # Ray is not typed
    """Ends a run at the first error of ours, which the same input would raise again.

    What a callback raises in Train's controller is never tried again.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the worker's error if it is ours."""
        ours = _ours(worker_exceptions.values())
        if ours is not None:
            # Wrapped already, so that Train's controller does not print its own traceback.
            raise ray.train.ControllerError(ours)


class _MetricsSink:
    """The only writer of a run's metrics log, on the node of the driver."""

    def __init__(self, path: str, place: str | None) -> None:
        self._log = MetricsLog(path)
        self._place = place

    def append(self, record: StepRecord, offset: int) -> None:
        metrics = {k: v for k, v in record.items() if k not in ("stage", "step")}
        self._log.append(record["stage"], record["step"], offset + record["step"], metrics)

    def keep(self) -> None:
        """Copy the log to its place in storage."""
        if self._place is not None:
            write_atomic(self._place, self._log.path.read_bytes())


@dataclass(frozen=True)
class _WorkerInput:
    job: StageJob
    sink: Any
    offset: int


def train_stage_on_ray(
    job: StageJob,
    folder: str,
    metrics_log: Path,
    offset: int,
    *,
    metrics_place: str | None = None,
) -> None:
    """Return when the stage's weights are in storage; a stage that is done is not run again.

    Args:
        folder: the stage's folder in storage, for Ray Train's checkpoints.
        metrics_log: file on this machine that gets a line a step.
        offset: steps of the stages before.
        metrics_place: where the log is copied to whenever a checkpoint counts; None: nowhere.

    Raises:
        RayembedError: what a worker raised, if it is one of ours.
        PlacementError: the workers could not be started.
        WorkerError: workers failed more often than `placement.max_failures`.
    """
    if is_done(job):
        logger.info("stage %s is done: %s", job.stage.name, job.weights)
        return
    _wait_for_workers(job.run.placement)
    _fetch_model(job.run)
    actor = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=_here())(_MetricsSink)
    sink = actor.remote(str(metrics_log), metrics_place)
    filesystem, path = open_storage(folder)
    placement = job.run.placement
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"input": _WorkerInput(job, sink, offset)},
        torch_config=TorchConfig(
            backend="nccl" if placement.use_gpu else "gloo", timeout_s=COLLECTIVE_TIMEOUT_SECONDS
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=placement.workers,
            use_gpu=placement.use_gpu,
            resources_per_worker=worker_resources(placement),
        ),
        run_config=ray.train.RunConfig(
            name="train",
            storage_path=path,
            storage_filesystem=filesystem if is_remote(folder) else None,
            failure_config=ray.train.FailureConfig(
                max_failures=placement.max_failures, controller_failure_limit=CONTROLLER_FAILURES
            ),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=placement.keep_checkpoints,
                checkpoint_score_attribute="loss",
                checkpoint_score_order="min",
            ),
            callbacks=[_OursAtOnce()],
            worker_runtime_env={"env_vars": worker_environment(placement)},
            logging_config=ray.train.LoggingConfig(log_level=_LOG_LEVEL),
        ),
    )
    with Progress(job.stage, metrics_log):
        try:
            trainer.fit()
        except ray.train.v2.api.exceptions.TrainingFailedError as error:
            raise _cause(error, job) from error
        finally:
            ray.kill(sink)


def _wait_for_workers(placement: Placement) -> None:
    """Let Train wait for nodes that have gone while data was prepared, as long as at the start."""
    if placement.wait_for_nodes_seconds > _WORKER_START_SECONDS:
        seconds = str(placement.wait_for_nodes_seconds)
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", seconds)


def _fetch_model(run: Run) -> None:
    """Have the backbone on each node that can hold a worker, before workers wait for one another.

    A node that fetched it in its worker could outlast the time limit of the others' collective.
    """
    reference = run.model.backbone.path
    nodes = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and workers_that_fit(run.placement, [node["Resources"]])
    ]
    if len(nodes) > 1:
        logger.info("having %s on each of %d nodes", reference, len(nodes))
    # Soft: on a node that has gone meanwhile nobody needs it.
    places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
    fetch = ray.remote(num_cpus=0, max_retries=2)(resolve_model)
    _wait_for(
        [fetch.options(scheduling_strategy=p).remote(reference) for p in places],
        f"fetching {reference!r} to a node",
        "Give the nodes more memory if it fails again.",
    )


def worker_environment(placement: Placement) -> dict[str, str]:
    """Environment of the training workers."""
    threads = placement.threads_per_worker or max(1, int(placement.cpus_per_worker))
    values = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    }
    if not placement.use_gpu:
        values["DS_ACCELERATOR"] = "cpu"
        # Steps allocate and free gigabytes: with jemalloc, which Ray's wheels for Linux bring, a
        # worker needs less memory than with glibc (docs/LOG.md). Its pages must be allowed to
        # decay: kept for ever (dirty_decay_ms:-1) they grew to three times the need.
        jemalloc = Path(ray.__file__).parent / "core" / "libjemalloc.so"
        if jemalloc.exists() and "LD_PRELOAD" not in os.environ:
            values["LD_PRELOAD"] = str(jemalloc)
    return values


def export_on_ray(run: Run, weights: str | None, folder: str) -> None:
    """Return when the model with the weights (None: untrained) lies in a folder of storage.

    A task on any node writes it, because it needs memory for the whole model.

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
    """Return when the tasks are done; their errors come unwrapped, a lost one as WorkerError."""
    try:
        ray.get(tasks)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"{what} was lost with its process or node: {error}\n{advice} Submit the run again "
            "under the same name to go on from here."
        ) from error


def _worker(config: dict[str, Any]) -> None:
    """The train function: runs in each worker."""
    # As in the driver: Ray Train lets everybody's INFO through here, not only ours.
    logging.getLogger().setLevel(_LOG_LEVEL)
    logging.getLogger("rayembed").setLevel(logging.INFO)
    try:
        _train_on_worker(config["input"])
    except RayembedError:
        # The driver tells its message; Train would print a traceback from every worker besides.
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        raise


def _train_on_worker(given: _WorkerInput) -> None:
    job = given.job
    pending: list[Any] = []
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if job.run.placement.use_gpu else "cpu")

    def stream(
        tokenizer: Tokenizer, worker: int, num_workers: int, start_step: int
    ) -> Iterable[StepBatch]:
        return stream_steps(
            job.plan_folder,
            tokenizer,
            worker=worker,
            num_workers=num_workers,
            start_step=start_step,
        )

    def report_checkpoint(part: Path, step: int, loss: float) -> None:
        if pending:  # a step that a checkpoint counts as done must be in the log, and stay there
            ray.get([*pending, given.sink.keep.remote()])
            pending.clear()
        ray.train.report(
            {"step": step, "loss": loss},
            checkpoint=ray.train.Checkpoint.from_directory(str(part)),
            checkpoint_dir_name=f"step-{step:07d}",
        )

    def report_step(record: StepRecord) -> None:
        pending.append(given.sink.append.remote(record, given.offset))

    checkpoint = ray.train.get_checkpoint()
    surroundings = Surroundings(stream, None, report_checkpoint, report_step)
    if checkpoint is None:
        train_stage(job, surroundings)
    else:
        with checkpoint.as_directory() as folder:
            train_stage(job, Surroundings(stream, Path(folder), report_checkpoint, report_step))


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _ours(failures: Iterable[Any]) -> RayembedError | None:
    """The first error of ours among failures, out of Train's wrapping."""
    inner = (getattr(failure, "_base_exc", failure) for failure in failures)
    return next((error for error in inner if isinstance(error, RayembedError)), None)


def _cause(error: Any, job: StageJob) -> RayembedError:
    """What a worker raised if it is ours, else an error that tells the first failure."""
    failures = list((getattr(error, "worker_failures", None) or {}).values())
    controller = getattr(error, "controller_failure", None)
    ours = _ours([*failures, controller])
    if ours is not None:
        return ours
    placement, stage = job.run.placement, f"stage {job.stage.name!r}"
    again = "Submit the run again under the same name to go on from its last checkpoint."
    if isinstance(controller, _NOT_STARTED):
        return PlacementError(
            f"{stage}: {placement.workers} workers of {worker_resources(placement)} each could not "
            "be started, though the nodes are large enough; most likely other jobs hold their CPUs "
            "and GPUs, or nodes have gone. Free them (`ray status` shows what is taken, `ray job "
            "stop` ends a job), lower placement.workers, or wait longer with "
            f"placement.wait_for_nodes_seconds. {again} Ray Train says: {controller}"
        )
    if not failures:
        return WorkerError(f"{stage}: Ray Train's controller failed: {error}. {again}")
    return WorkerError(
        f"{stage}: workers failed more often than placement.max_failures="
        f"{placement.max_failures} allows; the first failure: {failures[0]}. {again}"
    )

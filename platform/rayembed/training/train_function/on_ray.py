"""The function that Ray Train runs in each worker, and the worker's environment.

Workers import this and not the driver's side: each of them waits for its imports.
"""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import is_full, is_unanswered, open_storage_for_ray
from rayembed.config.placement import Placement
from rayembed.data.plan.on_ray import prefetched_on_ray
from rayembed.data.plan.stream import prefetched
from rayembed.distributed.collectives import rank
from rayembed.errors import RayembedError, StorageError, StorageFullError
from rayembed.training.callbacks import Preemption
from rayembed.training.checkpoint import Checkpoint
from rayembed.training.checkpoint_list import checkpoint_name
from rayembed.training.dropped import mean_of_finite
from rayembed.training.job import Job
from rayembed.training.trainer import Callback, StepRecord

LOG_LEVEL = "WARNING"
"""Log level of other libraries in Train's own processes."""

_PROCESSES_BESIDE_GPU = 2
"""Processes that build the batches of a worker on a GPU."""


_ANSWER_SECONDS = 5.0


def worker_environment(placement: Placement) -> dict[str, str]:
    """Environment variables of the training workers."""
    values = {
        "OMP_NUM_THREADS": str(placement.threads),
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


def step_processes(placement: Placement) -> int:
    """Number of processes that build each worker's batches; 0 for a thread of the worker."""
    if placement.step_processes is not None:
        return placement.step_processes
    return _PROCESSES_BESIDE_GPU if placement.use_gpu else 0


def train_function(config: dict[str, Any]) -> None:
    """Train on this worker, from the job's last checkpoint if any.

    Args:
        config: `job`; `sink`, the `MetricsSink` actor; `offset`, the steps of earlier stages.

    Raises:
        RayembedError: what the job raises, or the storage of its checkpoints.
    """
    # As in the driver: Ray Train lets everybody's INFO through here, not only ours.
    logging.getLogger().setLevel(LOG_LEVEL)
    logging.getLogger("rayembed").setLevel(logging.INFO)
    try:
        _train(**config)
    except RayembedError:
        # The driver tells its message; Train would print a traceback from every worker besides.
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        raise


def _train(job: Job, sink: Any, offset: int) -> None:
    placement = job.placement
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if placement.use_gpu else "cpu")
    # A node that came after the driver had all fetch them does so now: this waits for it, where
    # the first collective of training has a time limit.
    for reference in job.pretrained:
        resolve_model(reference)
    ray.train.collective.barrier()
    checkpoint = ray.train.get_checkpoint()
    other_run = job.start_checkpoint if checkpoint is None else None
    if other_run is not None:
        filesystem, path = open_storage_for_ray(other_run)
        checkpoint = ray.train.Checkpoint(path, filesystem)
    processes = step_processes(placement)
    stream = partial(prefetched_on_ray, processes=processes) if processes else prefetched
    minutes = placement.checkpoint_minutes
    stops = Preemption(lambda: _must_stop(sink), every_minutes=minutes)
    trainer = job.trainer([TrainReport(sink, offset), stops], stream)
    if checkpoint is None:
        trainer.fit()
        return
    with checkpoint.as_directory() as folder:
        start = Checkpoint(Path(folder), trainer.position, from_other_run=other_run is not None)
        trainer.fit(start)


class TrainReport(Callback):
    """Tells the driver's actor of steps, and Ray Train of checkpoints with the mean loss since the
    last.

    Args:
        sink: the `MetricsSink` actor.
        offset: steps of earlier stages.
    """

    def __init__(self, sink: Any, offset: int) -> None:
        self._sink, self._offset = sink, offset
        self._pending: list[Any] = []
        self._losses: list[float] = []

    def on_step_end(self, record: StepRecord) -> None:
        """Send a step's metrics, from worker 0."""
        self._losses.append(record["loss"])
        if rank() == 0:
            self._pending.append(self._sink.append.remote(record, self._offset))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Hand this worker's part to Ray Train, which stores it.

        Raises:
            StorageError: the storage does not take it.
        """
        if self._pending:  # a step that a checkpoint counts as done must be in the log, and stay
            try:
                ray.get([*self._pending, self._sink.keep.remote()])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            self._pending.clear()
        try:
            ray.train.report(
                {"step": step, "loss": mean_of_finite(self._losses)},
                checkpoint=ray.train.Checkpoint.from_directory(str(folder)),
                checkpoint_dir_name=checkpoint_name(step),
            )
        except OSError as error:
            raise _not_kept(step, error) from error
        self._sink.saved.remote(step, ray.train.get_context().get_world_size())
        self._losses.clear()


def _must_stop(sink: Any) -> bool:
    """Whether this worker knows that training must end: its node goes, or the run is stopped.

    Of a stop the first worker asks the actor, others never do.
    """
    if ray.train.get_preemption_info() is not None:
        return True
    if rank():
        return False
    try:
        return bool(ray.get(sink.stops.remote(), timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError:
        return False


def _not_kept(step: int, error: OSError) -> StorageError:
    """Error for the user when a step's checkpoint could not be stored."""
    if is_full(error):
        return StorageFullError(
            f"the checkpoint of step {step} does not fit into storage: {error}. Make room there, "
            "then submit the run again under the same name: it goes on from the checkpoint before."
        )
    silent = ", because the storage does not answer" if is_unanswered(error) else ""
    return StorageError(f"the checkpoint of step {step} cannot be stored{silent}: {error}")

"""The function that Ray Train runs in each worker, and the worker's environment.

Workers import this and not the driver's side: each of them waits for its imports.
"""

import logging
import os
from dataclasses import dataclass, replace
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
from rayembed.errors import RayembedError, StorageError, StorageFullError
from rayembed.training.checkpoint_list import checkpoint_name
from rayembed.training.loop import StepRecord
from rayembed.training.on_worker import Job, TrainerHooks
from rayembed.training.stopping.on_ray import is_stopped

LOG_LEVEL = "WARNING"
"""Log level of other libraries in Train's own processes."""

_PROCESSES_BESIDE_GPU = 2
"""Processes that build the batches of a worker on a GPU."""


@dataclass(frozen=True)
class WorkerInput:
    """Input of the train function."""

    job: Job
    sink: Any
    """Actor that receives metrics: a `MetricsSink`."""
    offset: int
    """Number of steps in earlier stages."""


def worker_environment(placement: Placement) -> dict[str, str]:
    """Environment variables of the training workers."""
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


def step_processes(placement: Placement) -> int:
    """Number of processes that build each worker's batches; 0 for a thread of the worker."""
    if placement.step_processes is not None:
        return placement.step_processes
    return _PROCESSES_BESIDE_GPU if placement.use_gpu else 0


def train_function(config: dict[str, WorkerInput]) -> None:
    """Train the job of `config["input"]` on this worker, from its last checkpoint if any.

    Raises:
        RayembedError: what the job raises, or the storage of its checkpoints.
    """
    # As in the driver: Ray Train lets everybody's INFO through here, not only ours.
    logging.getLogger().setLevel(LOG_LEVEL)
    logging.getLogger("rayembed").setLevel(logging.INFO)
    try:
        _train(config["input"])
    except RayembedError:
        # The driver tells its message; Train would print a traceback from every worker besides.
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        raise


def _train(given: WorkerInput) -> None:
    job = given.job
    pending: list[Any] = []
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if job.placement.use_gpu else "cpu")

    def report_checkpoint(part: Path, step: int, loss: float) -> None:
        if pending:  # a step that a checkpoint counts as done must be in the log, and stay there
            try:
                ray.get([*pending, given.sink.keep.remote()])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            pending.clear()
        try:
            ray.train.report(
                {"step": step, "loss": loss},
                checkpoint=ray.train.Checkpoint.from_directory(str(part)),
                checkpoint_dir_name=checkpoint_name(step),
            )
        except OSError as error:
            raise _not_kept(step, error) from error
        given.sink.saved.remote(step, ray.train.get_context().get_world_size())

    def should_stop() -> bool:
        return ray.train.get_preemption_info() is not None or is_stopped(given.sink)

    def report_step(record: StepRecord) -> None:
        pending.append(given.sink.append.remote(record, given.offset))

    # A node that came after the driver had all fetch them does so now: this waits for it, where
    # the first collective of training has a time limit.
    for reference in job.pretrained:
        resolve_model(reference)
    ray.train.collective.barrier()
    checkpoint = ray.train.get_checkpoint()
    from_other_run = False
    if checkpoint is None and job.start_checkpoint is not None:
        from_other_run = True
        filesystem, path = open_storage_for_ray(job.start_checkpoint)
        checkpoint = ray.train.Checkpoint(path, filesystem)
    processes = step_processes(job.placement)
    hooks = TrainerHooks(
        stream=partial(prefetched_on_ray, processes=processes) if processes else prefetched,
        checkpoint=None,
        report_checkpoint=report_checkpoint,
        report_step=report_step,
        from_other_run=from_other_run,
        should_stop=should_stop,
    )
    if checkpoint is None:
        job.train(hooks)
    else:
        with checkpoint.as_directory() as folder:
            job.train(replace(hooks, checkpoint=Path(folder)))


def _not_kept(step: int, error: OSError) -> StorageError:
    """Error for the user when a step's checkpoint could not be stored."""
    if is_full(error):
        return StorageFullError(
            f"the checkpoint of step {step} does not fit into storage: {error}. Make room there, "
            "then submit the run again under the same name: it goes on from the checkpoint before."
        )
    silent = ", because the storage does not answer" if is_unanswered(error) else ""
    return StorageError(f"the checkpoint of step {step} cannot be stored{silent}: {error}")

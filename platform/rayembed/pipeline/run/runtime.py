"""Choose where a run's work is done: in this process, or on a Ray cluster."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from transformers.utils.logging import disable_progress_bar

from rayembed.config.data_run import DataRun
from rayembed.config.document import NamedRun
from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun
from rayembed.config.placement import Placement, RuntimeSettings, is_device
from rayembed.config.settings import Settings
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.here import execute_here
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.display.progress import doing
from rayembed.display.quiet import MLFLOW, quiet, set_unset
from rayembed.errors import PlacementError
from rayembed.evaluation.pooled.here import run_shown
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.score import Pool
from rayembed.machine.cores import Threads, free_threads, num_cores
from rayembed.machine.device import (
    SeenGpus,
    check_deterministic_start,
    set_allocator,
    settled_placement,
)
from rayembed.machine.gpu_check import gpu_facts, gpu_problem, usable_gpus_here
from rayembed.machine.hardware import Precision, auto_precision
from rayembed.pipeline.checks.precision import AnyRun, run_settled
from rayembed.pipeline.job import work_begins
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.registry.provenance import node_hardware
from rayembed.training.here import take_device, train_here
from rayembed.training.memory.capacity import Node, check_capacity, check_validation_capacity

logger = logging.getLogger(__name__)


class Here:
    """Runtime that does a run's work in this process.

    Args:
        deterministic: whether a GPU must compute the same bits each time.
    """

    execute = staticmethod(execute_here)
    train = staticmethod(train_here)

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def start(self) -> None:
        """Hide the progress logs of libraries, but not their warnings, as on Ray.

        Sets what torch reads when it first uses a GPU.
        """
        work_begins()
        if self._deterministic:
            check_deterministic_start()
        set_unset(MLFLOW)
        set_allocator()
        quiet()
        disable_progress_bar()

    def gpus(self, placement: Settings) -> SeenGpus:
        """Usable GPUs of this machine."""
        return usable_gpus_here()

    def check_now(self, placement: Placement, *, validates: bool = False) -> None:
        """Check that this process can train on the configured device, and that the machine has
        enough CPUs and a working GPU.

        Raises:
            PlacementError: it cannot, or something is missing.
        """
        if placement.on_gpu:
            facts = gpu_facts()
            # A driver that is too old would count as no GPU below.
            if facts.driver is not None and (problem := gpu_problem(facts, is_here=True)):
                raise PlacementError(f"{problem}, or train on CPUs (placement.use_gpu=false)")
            if placement.gpu and facts.gpu and not is_device(placement.gpu, facts.gpu):
                logger.warning(
                    "placement.gpu is %s, but this machine's GPU is %s; the run uses the "
                    "GPU of this machine",
                    *(placement.gpu, facts.gpu),
                )
        nodes = [_this_machine()]
        check_capacity(placement, nodes)
        if validates:
            check_validation_capacity(placement, nodes)
        take_device("cuda" if placement.on_gpu else "cpu")

    def check(self, placement: Placement, *, validates: bool = False) -> None:
        """Do nothing: this machine has not changed since `check_now`."""

    def precision(self, placement: Placement | EvaluationPlacement) -> Precision:
        """Number type that this machine computes fast."""
        return auto_precision("cuda" if placement.on_gpu else "cpu")

    def is_here(self) -> bool:
        """Return True, because this process does the work."""
        return True

    def hardware(self, placement: Placement) -> dict[str, Any]:
        """Describe the hardware of this machine."""
        return node_hardware()

    def data_context(self, run: DataRun) -> PipelineContext:
        """Make the context that runs data tasks on this machine."""
        placement = run.placement
        execute = partial(execute_here, use_gpu=placement.use_gpu)
        loader = TeacherLoader()
        if not placement.use_gpu:
            loader = TeacherLoader(precision=partial(auto_precision, "cpu"))
        return PipelineContext(placement.storage_path, run.seed, execute, loader, run.data.root)

    def export(
        self, export: Callable[..., None], run: Any, weights: str | None, folder: str
    ) -> None:
        """Call `export(run, weights, folder)` in this process."""
        with doing(f"exporting {folder}"):
            export(run, weights, folder)

    def pool(self, workers: Workers) -> Pool:
        """Make the evaluation pool that runs in this process."""
        return partial(run_shown, workers=workers)


def _this_machine() -> Node:
    return {"CPU": float(num_cores()), "GPU": float(torch.cuda.device_count())}


Runtime = Here | OnRay
"""Place where a run is done; both kinds have the same methods."""

PlacedRun = TypeVar("PlacedRun", bound=NamedRun | EvaluationRun)


def with_device(run: PlacedRun, runtime: Runtime) -> PlacedRun:
    """Resolve `placement.use_gpu=auto` to GPU or CPU, and log the choice.

    Raises:
        PlacementError: a GPU is asked for and none is there, or `auto` cannot be decided.
    """
    placement = settled_placement(run.placement, runtime.gpus(run.placement))
    return cast(PlacedRun, run.model_copy(update={"placement": placement}))


def started(
    run: AnyRun, runtime: Runtime, *, validates: bool = False, is_trial: bool = False
) -> AnyRun:
    """Start the runtime, check that it can train the run, and resolve device, number type and
    threads.

    Each is said in one line, and so is the time that the run takes; a sweep says that of its
    trials.

    Raises:
        RayembedError: what was asked for is not there.
    """
    from rayembed.pipeline.run.dry_run import estimates

    runtime.start()
    run = with_device(run, runtime)
    runtime.check_now(run.placement, validates=validates)
    if not is_trial and (expected := estimates().time([run])):
        logger.info("%s", expected)
    return with_threads(run_settled(run, runtime.precision), runtime)


def with_threads(run: AnyRun, runtime: Runtime) -> AnyRun:
    """Resolve `placement.threads_per_worker=auto` to a number of threads, and log it."""
    placement = run.placement
    if placement.threads_per_worker != "auto":
        return run
    chosen = Threads(placement.threads, "the workers are on other machines")
    if runtime.is_here():
        chosen = free_threads(placement.threads)
    number, why = chosen
    logger.info("%d thread(s) for each worker: %s (placement.threads_per_worker=auto)", number, why)
    update = {"placement": placement.model_copy(update={"threads_per_worker": number})}
    return run.model_copy(update=update)


def runtime_of(placement: RuntimeSettings) -> Runtime:
    """Return the runtime that a placement selects; `auto` takes Ray if a cluster's address is set
    or a setting needs Ray.
    """
    named = os.environ.get("RAY_ADDRESS")
    local = placement.runtime == "local" or (
        placement.runtime == "auto" and not named and not placement.needs_ray
    )
    if local:
        logger.info("this process does the work, without Ray (placement.runtime)")
        may_use_gpu = getattr(placement, "use_gpu", False) is not False
        return Here(deterministic=may_use_gpu and getattr(placement, "deterministic", False))
    return OnRay()

"""The own process as the place where a run is done: no Ray, one worker, a small pool for data."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rayembed.config.data_run import DataRun
from rayembed.config.evaluation_run import EvaluationPlacement
from rayembed.config.gpus import is_device
from rayembed.config.placement import Placement
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
from rayembed.machine.cores import num_cores
from rayembed.machine.device import SeenGpus, check_deterministic_start, set_allocator
from rayembed.machine.gpu_check import gpu_facts, gpu_problem, usable_gpus_here
from rayembed.machine.hardware import Precision, auto_precision
from rayembed.pipeline.job import work_begins
from rayembed.registry.provenance import node_hardware
from rayembed.training.here import take_device, train_here, train_stage_here
from rayembed.training.memory.capacity import Node, check_capacity, check_validation_capacity

logger = logging.getLogger(__name__)


class Here:
    """The runtime of this process; a `Runtime`.

    Args:
        deterministic: whether a GPU must compute the same bits each time.
    """

    execute = staticmethod(execute_here)
    train = staticmethod(train_here)
    train_stage = staticmethod(train_stage_here)

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def start(self) -> None:
        """Keep the libraries' progress out of the log, as on Ray; warnings stay.

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
        """GPUs of this machine."""
        return usable_gpus_here()

    def check_now(self, placement: Placement, *, validates: bool = False) -> None:
        """Check that this process can train on the placement's device, and that this machine has
        the CPUs and the GPU of a worker, which works.
        """
        if placement.on_gpu:
            facts = gpu_facts()
            # A driver that is too old would count as no GPU below.
            if facts.driver is not None and (problem := gpu_problem(facts, is_here=True)):
                raise PlacementError(f"{problem}, or train on CPUs (placement.use_gpu=false)")
            if placement.gpu and facts.gpu and not is_device(placement.gpu, facts.gpu):
                logger.warning(
                    "placement.gpu is %s, and this machine's GPU is %s: the run computes on that",
                    *(placement.gpu, facts.gpu),
                )
        nodes = [_this_machine()]
        check_capacity(placement, nodes)
        if validates:
            check_validation_capacity(placement, nodes)
        take_device("cuda" if placement.on_gpu else "cpu")

    def check(self, placement: Placement, *, validates: bool = False) -> None:
        """Do nothing: this machine is what it was at `check_now`."""

    def precision(self, placement: Placement | EvaluationPlacement) -> Precision:
        """Number type that this machine computes fast."""
        return auto_precision("cuda" if placement.on_gpu else "cpu")

    def is_here(self) -> bool:
        """Always: this process does the work."""
        return True

    def hardware(self, placement: Placement) -> dict[str, Any]:
        """Hardware of this machine."""
        return node_hardware()

    def data_context(self, run: DataRun) -> PipelineContext:
        """Context whose tasks this machine runs."""
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
        """Pool of this process."""
        return partial(run_shown, workers=workers)


def _this_machine() -> Node:
    return {"CPU": float(num_cores()), "GPU": float(torch.cuda.device_count())}

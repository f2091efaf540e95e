"""Decide whether a stage's layers are compiled if `placement.compile_layers` is `auto`."""

import logging
import os
import shutil

import torch
from torch.utils._triton import has_triton

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement
from rayembed.distributed.collectives import rank, world_size
from rayembed.models.contract import TrainableModel

logger = logging.getLogger(__name__)

_CAPABILITY = (8, 0)
"""Least compute capability: below it neither bfloat16 nor attention without padding is fast."""

_WORTH_SECONDS = 1200.0
"""Least time of a stage: compiling takes a minute or two, once for all layers of a kind, and gained
4 % of a step of BERT base on an H200; more is predicted of larger models."""

_SPEED, _ROW_TOKENS = 140e12, 256
"""Operations a second of BERT base on an H200 (benchmarks/gpu/README.md), and tokens of a row, by
which a stage's time is estimated to a factor of some three."""


def compiles(
    placement: Placement, stage: TrainLoopConfig, model: TrainableModel, device: torch.device
) -> bool:
    """Decide whether the stage's layers are compiled, and log the decision with its reason.

    Args:
        model: before an engine partitions it.
    """
    if placement.compile_layers != "auto":
        return placement.compile_layers
    if device.type != "cuda":
        return False
    seconds = stage_seconds(stage, model, world_size())
    reason = _why_not(placement, model, device, seconds)
    if not rank():
        told = "are compiled" if reason is None else f"are not compiled, because {reason}"
        logger.info(
            "stage %s: estimated to take %.0f minutes; its layers %s (placement.compile_layers)",
            *(stage.name, seconds / 60, told),
        )
    return reason is None


def stage_seconds(stage: TrainLoopConfig, model: torch.nn.Module, workers: int) -> float:
    """Estimate a stage's time on GPUs from six floating-point operations per parameter and
    token.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = stage.steps * stage.global_rows * _ROW_TOKENS
    return 6.0 * parameters * tokens / (_SPEED * workers)


def _why_not(
    placement: Placement, model: TrainableModel, device: torch.device, seconds: float
) -> str | None:
    """Return the reason not to compile the layers, to complete a sentence; None if compiling is
    worth it.
    """
    capability = torch.cuda.get_device_capability(device)
    reasons = {
        "zero_stage=3 partitions the weights in them": placement.zero_stage == 3,
        "expert_parallel exchanges tokens within them": placement.expert_parallel > 1,
        f"{type(model).__name__} has none": (
            type(model).compile_layers is TrainableModel.compile_layers
        ),
        "this GPU's compute capability is {}.{}, and it gains from 8.0 on".format(*capability): (
            capability < _CAPABILITY
        ),
        "Triton is not installed": not has_triton(),
        "no C compiler is installed, with which Triton builds its launchers": not _c_compiler(),
        f"compiling pays only for {_WORTH_SECONDS / 60:.0f} minutes of training or more": seconds
        < _WORTH_SECONDS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _c_compiler() -> bool:
    names = (os.environ.get("CC"), "gcc", "clang")  # those that Triton asks for
    return any(shutil.which(name) for name in names if name)

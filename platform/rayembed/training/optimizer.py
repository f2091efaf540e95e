"""Parameter groups and the optimiser; learning rates are set before each step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rayembed.config.stage import OptimizerConfig
from rayembed.errors import ConfigError
from rayembed.models.contract import TrainableModel
from rayembed.training.loss_parameters import PREFIX, LossParameters

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of AdamW's moments."""


@dataclass(frozen=True)
class GroupKey:
    """Common properties of the parameters in one group."""

    part: Literal["backbone", "fresh", "loss"]
    decayed: bool
    experts: str | None
    """Name of the worker group that shares these experts; None for parameters that all workers
    hold."""


def trained_parameters(
    model: TrainableModel, loss: LossParameters | None
) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters that are trained, by their names in checkpoints, the loss's last."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    if loss is not None:
        yield from ((PREFIX + name, p) for name, p in loss.named_parameters())


def parameter_groups(
    model: TrainableModel, loss: LossParameters | None, config: OptimizerConfig
) -> list[dict[str, object]]:
    """AdamW groups: backbone, fresh parameters or the loss's, with or without weight decay; `peak`
    is the peak rate.

    Vectors (biases, norms) are not decayed, nor are parameters of a loss. Experts that are shared
    out among workers have groups of their own, which say so in DeepSpeed's words.

    Raises:
        ConfigError: the model has no trainable parameter.
    """
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    for name, parameter in trained_parameters(model, loss):
        key = _key(model, name, parameter, config)
        groups.setdefault(key, []).append(parameter)
    if all(key.part == "loss" for key in groups):
        raise ConfigError("the model has no trainable parameter; set model.lora or leave it null")
    return [
        {
            "params": parameters,
            # Set before each step; zero, so that an engine's dry step at the start decays nothing.
            "lr": 0.0,
            "peak": _peak(key, config),
            "weight_decay": config.weight_decay if key.decayed else 0.0,
            **({} if key.experts is None else {"moe": True, "name": key.experts}),
        }
        for key, parameters in groups.items()
    ]


def _key(
    model: TrainableModel, name: str, parameter: nn.Parameter, config: OptimizerConfig
) -> GroupKey:
    if name.startswith(PREFIX):
        return GroupKey("loss", decayed=False, experts=None)
    return GroupKey(
        "backbone" if model.backbone_parameter(name) else "fresh",
        decayed=parameter.ndim >= 2 and config.weight_decay > 0,
        experts=getattr(parameter, "group_name", None),
    )


def build_optimizer(
    model: TrainableModel, loss: LossParameters | None, config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over all trained parameters, one kernel for each group."""
    groups = parameter_groups(model, loss, config)
    return torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's rate to `factor` times its peak; the backbone's (first group's) new rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _peak(key: GroupKey, config: OptimizerConfig) -> float:
    of_part = {"fresh": config.pooling_learning_rate, "loss": config.loss_learning_rate}
    rate = of_part.get(key.part)
    return config.learning_rate if rate is None else rate

"""Parameter groups and the optimiser; learning rates are set before each step."""

from dataclasses import dataclass

import torch
from torch import nn

from rayembed.config.stage import OptimizerConfig
from rayembed.errors import ConfigError
from rayembed.models.contract import TrainableModel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of AdamW's moments."""


@dataclass(frozen=True)
class GroupKey:
    """Common properties of the parameters in one group."""

    of_backbone: bool
    decayed: bool
    experts: str | None
    """Name of the worker group that shares these experts; None for parameters that all workers
    hold."""


def parameter_groups(model: TrainableModel, config: OptimizerConfig) -> list[dict[str, object]]:
    """AdamW groups: backbone or pooling, with or without weight decay; `peak` is the peak rate.

    Vectors (biases, norms) are not decayed. Experts that are shared out among workers have groups
    of their own, which say so in DeepSpeed's words.

    Raises:
        ConfigError: the model has no trainable parameter.
    """
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim >= 2 and config.weight_decay > 0
            experts = getattr(parameter, "group_name", None)
            key = GroupKey(model.backbone_parameter(name), decayed, experts)
            groups.setdefault(key, []).append(parameter)
    if not groups:
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


def build_optimizer(model: TrainableModel, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the model's trainable parameters, one kernel for each group."""
    return torch.optim.AdamW(
        parameter_groups(model, config), betas=config.betas, eps=config.eps, fused=True
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's rate to `factor` times its peak; the backbone's (first group's) new rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _peak(key: GroupKey, config: OptimizerConfig) -> float:
    if key.of_backbone or config.pooling_learning_rate is None:
        return config.learning_rate
    return config.pooling_learning_rate

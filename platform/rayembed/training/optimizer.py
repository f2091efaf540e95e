"""Parameter groups and the optimiser; learning rates are set anew before each step."""

from dataclasses import dataclass

import torch
from torch import nn

from rayembed.config.stage import OptimizerConfig
from rayembed.errors import ConfigError
from rayembed.models.contract import TrainableModel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, by torch's names."""


@dataclass(frozen=True)
class GroupKey:
    """What the parameters of one group have in common."""

    of_backbone: bool
    decayed: bool
    experts: str | None
    """Which group of workers holds the same ones; None: all workers do."""


def parameter_groups(model: TrainableModel, config: OptimizerConfig) -> list[dict[str, object]]:
    """Groups of AdamW: backbone or pooling, with or without weight decay; `peak` is their rate.

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
    """AdamW (arXiv 1711.05101) over the model's trainable parameters, one kernel a group."""
    return torch.optim.AdamW(
        parameter_groups(model, config), betas=config.betas, eps=config.eps, fused=True
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """The backbone's (first group's) new rate, after each group got `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _peak(key: GroupKey, config: OptimizerConfig) -> float:
    if key.of_backbone or config.pooling_learning_rate is None:
        return config.learning_rate
    return config.pooling_learning_rate

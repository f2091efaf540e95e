"""Parameter groups and the optimiser; the learning rates are set before each step."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from rayembed.config.optimizer import OptimizerConfig, TrainLoopConfig
from rayembed.errors import ConfigError
from rayembed.models.contract import TrainableModel
from rayembed.training.contrastive.engine_module import PREFIX, LossParameters

_GROUP = 2**28
"""Maximum elements of a group of matrices, which are gathered at a time: 1 GiB in fp32."""


@dataclass(frozen=True)
class GroupKey:
    """Properties that all parameters of an optimiser group share."""

    part: Literal["backbone", "fresh", "loss"]
    decayed: bool
    experts: str | None
    """Name of the worker group that shares these experts; None for parameters that all workers
    hold."""
    peak: float
    """Peak learning rate."""
    matrices: bool = False
    """Whether these are linear layers' weights in the backbone, for optimisers that treat them
    separately."""
    number: int = 0
    """Number of the group, where parameters are split since a single group would be too large."""


def trained_parameters(module: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters of a model or loss, with their names in checkpoints."""
    if module is not None:
        prefix = PREFIX if isinstance(module, LossParameters) else ""
        yield from ((prefix + name, p) for name, p in module.named_parameters() if p.requires_grad)


def parameter_groups(
    model: TrainableModel, loss: LossParameters | None, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Group parameters that share optimiser settings; in each group `peak` is the peak learning
    rate and `states` names the optimiser's states.

    Vectors (biases, norms) are not decayed, nor are parameters of a loss. Experts that are shared
    out among workers have groups of their own, which say so in DeepSpeed's words.

    Raises:
        ConfigError: the model has no trainable parameter, or a pattern of `rates` matches none, or
            two match the same; or a rate of fresh parameters or of the loss's is set, and there are
            none.
    """
    named = dict([*trained_parameters(model), *trained_parameters(loss)])
    if all(name.startswith(PREFIX) for name in named):
        raise ConfigError(
            "the model has no trainable parameter; set model.lora to train adapters, or "
            "model.lora=null to train all weights"
        )
    rates = _rates(list(named), config)
    _check_rates({_part(model, name) for name in named if name not in rates}, config)
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    in_matrices = 0
    for name, parameter in named.items():
        part = _part(model, name)
        matrix = config.splits_matrices and part == "backbone" and parameter in linear
        in_matrices += parameter.numel() if matrix else 0
        key = GroupKey(
            part,
            decayed=part != "loss" and parameter.ndim >= 2 and config.weight_decay > 0,
            experts=getattr(parameter, "group_name", None),
            peak=rates.get(name, _peak(part, config)),
            matrices=matrix,
            number=in_matrices // _GROUP if matrix else 0,
        )
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            # Set before each step; zero, so that an engine's dry step at the start decays nothing.
            "lr": 0.0,
            "peak": key.peak,
            "weight_decay": config.weight_decay if key.decayed else 0.0,
            "matrices": key.matrices,
            "states": config.states(matrix=key.matrices),
            **({} if key.experts is None else {"moe": True, "name": key.experts}),
        }
        for key, parameters in groups.items()
    ]


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's learning rate to `factor` times its peak; return the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _part(model: TrainableModel, name: str) -> Literal["backbone", "fresh", "loss"]:
    if name.startswith(PREFIX):
        return "loss"
    return "backbone" if model.backbone_parameter(name) else "fresh"


def _peak(part: str, config: OptimizerConfig) -> float:
    of_part = {"fresh": config.pooling_learning_rate, "loss": config.loss_learning_rate}
    rate = of_part.get(part)
    return config.learning_rate if rate is None else rate


def _check_rates(parts: Collection[str], config: OptimizerConfig) -> None:
    """Raise if a learning rate is set for parameters that the model does not have."""
    if config.pooling_learning_rate is not None and "fresh" not in parts:
        raise ConfigError(
            f"optimizer.pooling_learning_rate={config.pooling_learning_rate} has no effect, "
            "because no parameter outside the backbone is trained (only a pooling with "
            "weights or projections have such parameters); set it to null"
        )
    if config.loss_learning_rate is not None and "loss" not in parts:
        raise ConfigError(
            f"optimizer.loss_learning_rate={config.loss_learning_rate} has no effect, "
            "because the stage's loss has no trained parameter here (vector_distillation "
            "has one with projection=true or a teacher of another width); set it to null"
        )


def _rates(names: list[str], config: OptimizerConfig) -> dict[str, float]:
    """Return the learning rate of each parameter that matches a name pattern in
    `optimizer.rates`.
    """
    found: dict[str, str] = {}
    for pattern in config.rates:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"optimizer.rates: no trained parameter matches {pattern!r}; the model has "
                f"{len(names)}, such as {', '.join(names[:: max(len(names) // 4, 1)])}"
            )
        if twice := [name for name in matching if name in found]:
            raise ConfigError(
                f"optimizer.rates: the parameter {twice[0]!r} matches {found[twice[0]]!r} "
                f"and {pattern!r}; change the patterns so that each parameter matches only "
                "one"
            )
        found |= dict.fromkeys(matching, pattern)
    return {name: config.rates[pattern] for name, pattern in found.items()}


def learning_rate_factor(step: int, loop_config: TrainLoopConfig) -> float:
    """Return the fraction of the peak learning rate at a step, counted from 0.

    Linear warm-up from 1/warmup_steps to 1, then the schedule, which would reach zero one
    step after the last, or at `decay_steps`.
    """
    warmup = loop_config.optimizer.warmup(loop_config.steps)
    if step < warmup:
        return (step + 1) / warmup
    end = loop_config.optimizer.decay_steps or loop_config.steps
    progress = (step - warmup) / max(end - warmup, 1)
    return loop_config.optimizer.schedule.factor(progress)

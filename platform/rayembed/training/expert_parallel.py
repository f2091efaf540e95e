"""Expert parallelism: the experts of each layer are split over a group of workers.

Rows of tokens go to the workers of their experts and come back (`models/experts.py`). What
DeepSpeed gives are the groups, and the reduction of each parameter over the workers that hold the
same one. Its own layers cannot stand for ours: `MoE` fills up or cuts the tokens of every expert to
one number and makes the probabilities of two experts add up to one, and the experts of `AutoEP` are
gated, with a third matrix.

W workers in groups of P: W / P workers hold the same experts.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rayembed.distributed.expert_group import ExpertGroup
from rayembed.errors import PlacementError
from rayembed.models.experts import Experts, expert_layers


def spread_experts(model: nn.Module, group: ExpertGroup) -> None:
    """Keep only this worker's share of each layer's experts, and mark their parameters for
    DeepSpeed.

    Whole weights must be loaded before, and parameters taken from the model after.

    Raises:
        PlacementError: the model has no experts, or the group cannot share them out equally.
    """
    layers = expert_layers(model)
    if not layers:
        raise PlacementError(
            f"placement.expert_parallel is {group.size}, but the model has no experts to "
            "split; set placement.expert_parallel=1"
        )
    for layer in layers:
        if layer.num_experts % group.size:
            raise PlacementError(
                f"placement.expert_parallel={group.size} cannot split {layer.num_experts} "
                "experts equally; set it to a divisor of the number of experts"
            )
        layer.spread(group)
        for parameter in layer.mlp.parameters():
            # By these it reduces a gradient over the W / P workers of the same experts, and still
            # divides by W. That is right: the tokens of P workers are in the gradient already.
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = group_name(group.size)  # type: ignore[attr-defined]


def group_name(size: int) -> str:
    """Return DeepSpeed's name for an expert group of this size."""
    return f"ep_size_{size}"


class SpreadExperts:
    """Gathers and splits the parameters of experts that are spread over workers, for the
    engine.

    Everything that takes a tensor is called by all workers of the group.
    """

    def __init__(self, layers: Iterable[Experts], group: ExpertGroup) -> None:
        layers = list(layers)
        self.group = group
        self.num_experts = layers[0].num_experts
        self._parameters = {p for layer in layers for p in layer.mlp.parameters()}

    @classmethod
    def of(cls, model: nn.Module) -> "SpreadExperts | None":
        """Return a `SpreadExperts` for a model whose experts are spread over workers; None if each
        worker holds all parameters.
        """
        layers = [layer for layer in expert_layers(model) if layer.group is not None]
        group = layers[0].group if layers else None
        return None if group is None else cls(layers, group)

    def whole(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return a parameter's full value: gathered from the group's workers for an expert,
        otherwise unchanged.
        """
        return self.group.gather(value) if parameter in self._parameters else value

    def own(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return the part of a full parameter value that this worker holds."""
        return self.group.share_of(whole) if parameter in self._parameters else whole

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Compute the gradient norm of the whole model; every worker gets the same scalar."""
        grads = [(p in self._parameters, p.grad) for p in parameters if p.grad is not None]
        shared = torch.nn.utils.get_total_norm([grad for spread, grad in grads if not spread])
        own = torch.nn.utils.get_total_norm([grad for spread, grad in grads if spread])
        return torch.sqrt(shared.square() + self.group.sum(own.square()))

"""Trained part of a model's weights, by stable names."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayembed.errors import ArtifactError


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Detached trainable parameters by name, sharing the model's memory."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trainable_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy saved values into the trainable parameters, in their dtype and on their device.

    Raises:
        ArtifactError: names or shapes differ; nothing has been copied then.
    """
    own = trainable_state(model)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unexpected:
        raise ArtifactError(
            "the saved weights are of another model: "
            f"missing {len(missing)} {missing[:10]}, unexpected {len(unexpected)} {unexpected[:10]}"
        )
    for name, parameter in own.items():
        if parameter.shape != state[name].shape:
            raise ArtifactError(
                f"the saved weight {name!r} has the shape {tuple(state[name].shape)}, the model's "
                f"has {tuple(parameter.shape)}"
            )
    for name, parameter in own.items():
        parameter.copy_(state[name])

"""Parameters of a loss while it is trained.

P numbers in all parameters of a loss.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayembed.config.loss import LossConfig
from rayembed.models.contract import TrainableModel

PREFIX = "loss:"
"""What the names of a loss's parameters begin with in checkpoints; no module can have such a name.
"""


class LossParameters(TrainableModel):
    """A loss's trained parameters, each as the change of its initial value.

    In bfloat16 a value of -10 moves in steps of 1/16; its change keeps eight bits of its own.
    """

    initial: Tensor

    def __init__(self, loss: LossConfig) -> None:
        super().__init__()
        initial = loss.initial_parameters()
        # Flat, because DeepSpeed cannot send a scalar.
        flat = {name: value.flatten() for name, value in initial.items()}
        self.register_buffer("initial", torch.cat([*flat.values()]), persistent=False)
        for name, value in flat.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(value)))

    def forward(self) -> Tensor:
        """(P,) float32 current values of all parameters."""
        return self.initial + torch.cat([*self.parameters()]).float()


def named_values(loss: LossConfig, values: Tensor) -> dict[str, Tensor]:
    """Values (P,) of `LossParameters` by name, in their shapes."""
    initial = loss.initial_parameters()
    parts = torch.split(values, [value.numel() for value in initial.values()])
    pairs = zip(initial.items(), parts, strict=True)
    return {name: part.view(value.shape) for (name, value), part in pairs}


def metrics_of(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar parameters of a loss, as metrics of a step."""
    scalars = {name: value for name, value in parameters.items() if value.numel() == 1}
    return {f"loss_{name}": float(value.detach()) for name, value in scalars.items()}

"""Module that a training engine wraps: a model together with the trained parameters of its
loss.

P numbers in all parameters of a loss.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayembed.config.loss import LossConfig, Widths
from rayembed.models.contract import EmbeddingModel, EmbedOutput, TrainableModel
from rayembed.training.contrastive.hidden_states import StateErrors

PREFIX = "loss:"
"""What the names of a loss's parameters begin with in checkpoints; no module can have such a name.
"""


class LossParameters(TrainableModel):
    """Trained parameters of a loss, each stored as the difference from its initial value.

    In bfloat16 a value of -10 moves in steps of 1/16; its change keeps eight bits of its own.
    """

    initial: Tensor

    def __init__(self, loss: LossConfig, widths: Widths) -> None:
        super().__init__()
        initial = loss.initial_parameters(widths)
        # Flat, because DeepSpeed cannot send a scalar.
        flat = {name: value.flatten() for name, value in initial.items()}
        self.register_buffer("initial", torch.cat([*flat.values()]), persistent=False)
        for name, value in flat.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(value)))

    def forward(self) -> Tensor:
        """Return the current values (P,) float32 of all parameters."""
        return self.initial + torch.cat([*self.parameters()]).float()


def loss_parameters(loss: LossConfig, widths: Widths) -> LossParameters | None:
    """Create a loss's trained parameters at their initial values; None if it has none for these
    widths.

    Raises:
        ConfigError: the loss cannot compare vectors of these widths.
    """
    return LossParameters(loss, widths) if loss.initial_parameters(widths) else None


def parameter_shapes(loss: LossConfig, widths: Widths) -> dict[str, torch.Size]:
    """Return the shapes of a loss's trained parameters by name, in order, without creating them."""
    with torch.device("meta"):
        return {name: value.shape for name, value in loss.initial_parameters(widths).items()}


def named_values(shapes: Mapping[str, torch.Size], values: Tensor) -> dict[str, Tensor]:
    """Split the flat values (P,) of `LossParameters` into tensors of the given shapes, by name."""
    parts = torch.split(values, [shape.numel() for shape in shapes.values()])
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: part.view(shape) for (name, shape), part in pairs}


def scalars_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a loss's scalar parameters by metric name, detached, so that each step can log
    them.
    """
    return {f"loss_{n}": value.detach() for n, value in parameters.items() if value.numel() == 1}


class EngineModule(nn.Module):
    """The model and its loss's parameters as one module with one forward method, as engines
    require.

    All go through the engine's own forward pass, which partitioned parameters need.

    Args:
        teachers: widths of the vectors of the stage's teachers.
        states: adds the errors of the model's hidden states to its statistics.

    Raises:
        ConfigError: the loss cannot compare vectors of these widths.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        loss: LossConfig | None = None,
        teachers: tuple[int, ...] = (),
        states: StateErrors | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.states = states
        self.loss: LossParameters | None = None
        if loss is not None:
            found = loss_parameters(loss, Widths(model.dimensions[0], teachers))
            self.loss = None if found is None else found.to(next(model.parameters()).device)

    def forward(
        self,
        inputs: dict[str, Tensor] | None,
        context: Tensor | None = None,
        only_context: bool = False,
        only_loss: bool = False,
    ) -> EmbedOutput | Tensor:
        """Return the model's outputs, or only context vectors, or only the loss's parameter values,
        by the arguments.
        """
        if only_loss:
            assert self.loss is not None
            values: Tensor = self.loss()
            return values
        assert inputs is not None
        if only_context:
            return self.model.embed_context(inputs)
        if self.states is not None:
            return self.states(inputs)
        output: EmbedOutput = self.model(inputs, context)
        return output

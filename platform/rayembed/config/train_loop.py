"""The trainer's view of a stage: steps and optimiser, for any objective."""

from typing import Protocol

from rayembed.config.loss import LossConfig
from rayembed.config.optimizer import OptimizerConfig


class TrainLoopConfig(Protocol):
    """A number of steps with one optimiser: a stage of a run, or an adaptation."""

    @property
    def name(self) -> str:
        """Name of its folder, its checkpoints and its log lines."""
        ...

    @property
    def steps(self) -> int:
        """Number of weight updates."""
        ...

    @property
    def checkpoint_every_steps(self) -> int:
        """Steps between two checkpoints; one is always made at the end."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig:
        """The optimiser and its schedule."""
        ...

    @property
    def loss(self) -> LossConfig | None:
        """The loss of embeddings; None for an objective without any."""
        ...

    @property
    def global_rows(self) -> int:
        """Rows of a step, over all workers."""
        ...

    @property
    def row_name(self) -> str:
        """Name of a row, in the plural: `pairs`, `sequences`."""
        ...

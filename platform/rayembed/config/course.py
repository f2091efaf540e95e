"""What the trainer knows of a stage of steps, whatever is learnt in it."""

from typing import Protocol

from rayembed.config.stage import OptimizerConfig


class Course(Protocol):
    """A number of steps with one optimiser; a stage of a run is one, and so is an adaptation."""

    @property
    def name(self) -> str:
        """Names its folder, its checkpoints and its lines in logs."""
        ...

    @property
    def steps(self) -> int:
        """Updates of the weights."""
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
    def global_rows(self) -> int:
        """Rows of a step, over all workers."""
        ...

    @property
    def row_name(self) -> str:
        """What a row is, in the plural: `pairs`, `sequences`."""
        ...

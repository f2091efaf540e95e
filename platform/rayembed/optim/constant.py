"""A learning rate that stays."""

from typing import ClassVar, Literal

from rayembed.config.schedule import ScheduleConfig


class Constant(ScheduleConfig):
    """The peak rate to the end."""

    kind: Literal["constant"] = "constant"
    decays: ClassVar[bool] = False

    def factor(self, progress: float) -> float:
        """Always 1."""
        return 1.0

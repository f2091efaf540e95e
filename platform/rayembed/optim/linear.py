"""A learning rate that falls in a straight line."""

from typing import Literal

from rayembed.config.schedule import ScheduleConfig


class Linear(ScheduleConfig):
    """Linear decay to zero."""

    kind: Literal["linear"] = "linear"

    def factor(self, progress: float) -> float:
        """1 at the start, 0 at the end."""
        return 1.0 - progress

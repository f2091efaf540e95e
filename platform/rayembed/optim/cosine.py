"""A learning rate that falls along half a cosine (arXiv 1608.03983, without restarts)."""

import math
from typing import Literal

from rayembed.config.schedule import ScheduleConfig


class Cosine(ScheduleConfig):
    """Decay to zero along half a cosine."""

    kind: Literal["cosine"] = "cosine"

    def factor(self, progress: float) -> float:
        """1 at the start, 0 at the end, falling most in the middle."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))

"""Learning-rate schedules: cosine (arXiv 1608.03983, without restarts), constant, linear, and
warm-up-stable-decay.
"""

import math
from typing import ClassVar, Literal

from pydantic import Field

from rayembed.config.optimizer import ScheduleConfig


class Cosine(ScheduleConfig):
    """Schedule that decays to zero along half a cosine."""

    kind: Literal["cosine"] = "cosine"

    def factor(self, progress: float) -> float:
        """Factor of the peak rate: 1 at the start, 0 at the end, falling fastest in the middle."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class Constant(ScheduleConfig):
    """Schedule that keeps the peak rate until the end."""

    kind: Literal["constant"] = "constant"
    decays: ClassVar[bool] = False

    def factor(self, progress: float) -> float:
        """Factor of the peak rate: always 1."""
        return 1.0


class Linear(ScheduleConfig):
    """Schedule that decays linearly to zero."""

    kind: Literal["linear"] = "linear"

    def factor(self, progress: float) -> float:
        """Factor of the peak rate: 1 at the start, 0 at the end."""
        return 1.0 - progress


class WSD(ScheduleConfig):
    """Schedule that keeps the peak rate, then decays linearly to zero over the last share of the
    steps after warm-up.
    """

    kind: Literal["wsd"] = "wsd"
    decay_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the steps after the warm-up in which the rate falls; 1 is `linear`. The first of
    them still has the peak and zero would follow the last, as in transformers: of n such steps the
    last has 1/n of the peak, and a share that is a single step long (0.1 of 10) changes nothing."""

    def factor(self, progress: float) -> float:
        """Factor of the peak rate: 1 until the decay, then linearly down to 0."""
        return min(1.0, (1.0 - progress) / self.decay_share)

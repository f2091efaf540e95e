"""Warm-up, stable, decay: a learning rate that stays and falls only at the end.

MiniCPM, arXiv 2404.06395, section 4.2.
"""

from typing import Literal

from pydantic import Field

from rayembed.config.schedule import ScheduleConfig


class WSD(ScheduleConfig):
    """The peak rate, then linear decay to zero over a last share of the steps after the warm-up."""

    kind: Literal["wsd"] = "wsd"
    decay_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the steps after the warm-up in which the rate falls; 1 is `linear`. The first of
    them still has the peak and zero would follow the last, as in transformers: of n such steps the
    last has 1/n of the peak, and a share that is a single step long (0.1 of 10) changes nothing."""

    def factor(self, progress: float) -> float:
        """1 up to the decay, then in a straight line to 0."""
        return min(1.0, (1.0 - progress) / self.decay_share)

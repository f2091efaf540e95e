"""Schedules of the learning rate as settings, and the table of those there are.

A schedule is one file of `optim/`.
"""

from typing import Any, ClassVar

from pydantic import SerializerFunctionWrapHandler, model_serializer

from rayembed.config.settings import Settings
from rayembed.config.table import Table


class ScheduleConfig(Settings):
    """Shape of the learning rate after the warm-up.

    A schedule without settings of its own is written as its kind alone: `schedule: cosine`.
    """

    kind: str

    decays: ClassVar[bool] = True
    """Whether it falls to zero, after the last step or after `optimizer.decay_steps`."""

    def factor(self, progress: float) -> float:
        """Fraction of the peak learning rate.

        Args:
            progress: share of the steps from the warm-up to the end that are done, in [0, 1).
        """
        raise TypeError(f"{type(self).__name__} has no shape")

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> Any:
        values = handler(self)
        return values["kind"] if len(values) == 1 else values


SCHEDULES = Table(
    "rayembed.schedules",
    ScheduleConfig,
    (
        "rayembed.optim.linear:Linear",
        "rayembed.optim.cosine:Cosine",
        "rayembed.optim.constant:Constant",
        "rayembed.optim.wsd:WSD",
    ),
    default="linear",
)
"""All schedules by their `kind`."""

"""Announced ends of training: a node is drained, or the run is stopped."""

import time
from collections.abc import Callable

import torch

from rayembed.distributed.collectives import largest, rank

LOOK_SECONDS = 5.0


class StopNotice:
    """Agrees over all workers on the step after which an announced end is known. Reports it once.

    Args:
        announced: whether they will; all workers ask together, and it counts if one of them knows.
        device: of messages between workers.
    """

    def __init__(
        self,
        announced: Callable[[], bool],
        device: torch.device,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._ask, self._device, self._every = announced, device, look_seconds
        self._announced, self._looked = False, time.monotonic()

    def arrived(self) -> bool:
        """Whether the end became known at this step; the same on all workers, which must all call
        it.
        """
        # Worker 0's clock decides, so that all ask after the same step.
        due = rank() == 0 and time.monotonic() - self._looked >= self._every
        if self._announced or not largest(int(due), self._device):
            return False
        self._looked = time.monotonic()
        self._announced = bool(largest(int(self._ask()), self._device))
        return self._announced

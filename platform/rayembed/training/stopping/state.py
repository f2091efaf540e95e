"""Shared state of workers and driver during a stop. Imports little, as it is an actor."""

from collections import Counter


class StopState:
    """Shared state of workers and driver during a stop, in an actor on the driver's node."""

    def __init__(self) -> None:
        self.trains = False
        """Whether a step was completed since the actor started."""
        self._stops = False
        self._parts: Counter[int] = Counter()
        self._saved = 0

    def stop(self) -> bool:
        """Request a checkpoint; whether workers are there to make one."""
        self._stops = True
        self._parts.clear()
        self._saved = 0
        return self.trains

    def stops(self) -> bool:
        """Whether a checkpoint is requested."""
        return self._stops

    def saved(self, step: int, workers: int) -> None:
        """Record that a worker stored its part of a step's checkpoint."""
        self._parts[step] += 1
        if self._parts[step] == workers:
            self._saved = step
            del self._parts[step]

    def saved_step(self) -> int:
        """Step of the last complete checkpoint since the stop, or since the start without a stop; 0
        without one.
        """
        return self._saved

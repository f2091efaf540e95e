"""What workers and driver tell each other of a stop; imports little, as its actor does."""

from collections import Counter


class Saving:
    """What workers and driver tell each other of a stop, in an actor of the driver's node."""

    def __init__(self) -> None:
        self.trains = False
        """Whether a step was done since the actor started."""
        self._stops = False
        self._parts: Counter[int] = Counter()
        self._saved = 0

    def stop(self) -> bool:
        """Ask for a checkpoint; whether workers are there to make one."""
        self._stops = True
        self._parts.clear()
        self._saved = 0
        return self.trains

    def stops(self) -> bool:
        """Whether one is asked for."""
        return self._stops

    def saved(self, step: int, workers: int) -> None:
        """A worker has its part of a step's checkpoint in storage."""
        self._parts[step] += 1
        if self._parts[step] == workers:
            self._saved = step
            del self._parts[step]

    def saved_step(self) -> int:
        """Of the last whole checkpoint since the stop, or without one since the start; 0: none."""
        return self._saved

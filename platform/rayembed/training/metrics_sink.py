"""Writer of a run's metrics log, which also passes a stop on to workers. Imports little, as each
stage waits for its process.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.registry.metrics_log import MetricsLog


class MetricsSink:
    """The only writer of a run's metrics log, and what workers and driver share during a stop.

    An actor on the driver's node.
    """

    def __init__(self, path: str, place: str | None) -> None:
        self._log = MetricsLog(path)
        self._place = place
        self._trains = self._stops = False
        self._parts: Counter[int] = Counter()
        self._saved = 0

    def append(self, record: Mapping[str, Any], offset: int) -> None:
        """Write a step's metrics; `offset` is the number of the run's steps before the stage."""
        metrics = {k: v for k, v in record.items() if k not in ("stage", "step")}
        self._log.append(record["stage"], record["step"], offset + record["step"], metrics)
        self._trains = True

    def keep(self) -> None:
        """Copy the log to storage."""
        if self._place is not None:
            write_atomic(self._place, self._log.path.read_bytes())

    def stop(self) -> bool:
        """Request a checkpoint; whether workers are there to make one."""
        self._stops = True
        self._parts.clear()
        self._saved = 0
        return self._trains

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

"""Writer of a run's metrics log. Imports little, as each stage waits for its process."""

from collections.abc import Mapping
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.stopping.state import StopState


class MetricsSink(StopState):
    """The only writer of a run's metrics log, on the driver's node."""

    def __init__(self, path: str, place: str | None) -> None:
        super().__init__()
        self._log = MetricsLog(path)
        self._place = place

    def append(self, record: Mapping[str, Any], offset: int) -> None:
        """Write a step's metrics; `offset` is the number of the run's steps before the stage."""
        metrics = {k: v for k, v in record.items() if k not in ("stage", "step")}
        self._log.append(record["stage"], record["step"], offset + record["step"], metrics)
        self.trains = True

    def keep(self) -> None:
        """Copy the log to storage."""
        if self._place is not None:
            write_atomic(self._place, self._log.path.read_bytes())

"""The writer of a run's metrics log: what its process imports, each stage waits for."""

from collections.abc import Mapping
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.stopping.saving import Saving


class MetricsSink(Saving):
    """The only writer of a run's metrics log, on the node of the driver."""

    def __init__(self, path: str, place: str | None) -> None:
        super().__init__()
        self._log = MetricsLog(path)
        self._place = place

    def append(self, record: Mapping[str, Any], offset: int) -> None:
        """Write a step of a stage before which the run had `offset` steps."""
        metrics = {k: v for k, v in record.items() if k not in ("stage", "step")}
        self._log.append(record["stage"], record["step"], offset + record["step"], metrics)
        self.trains = True

    def keep(self) -> None:
        """Copy the log to its place in storage."""
        if self._place is not None:
            write_atomic(self._place, self._log.path.read_bytes())

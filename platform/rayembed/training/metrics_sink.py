"""Single writer of a run's metrics log, which also passes a stop request on to the workers. Imports
little, as each stage waits for its process.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.faults.hang_reports import Hang, Where

logger = logging.getLogger(__name__)

_TOGETHER_SECONDS = 10.0
"""Time from the first worker that hangs until what all told is put together."""


class MetricsSink:
    """Actor that alone writes a run's metrics log, and through which workers and driver communicate
    when a run is stopped.

    An actor on the driver's node.
    """

    def __init__(self, path: str, place: str | None) -> None:
        self._log = MetricsLog(path)
        self._place = place
        self._trains = self._stops = False
        self._parts: Counter[int] = Counter()
        self._saved = 0
        self._hang = Hang()
        self._telling: threading.Timer | None = None

    def append(self, record: Mapping[str, Any], offset: int) -> None:
        """Write a step's metrics to the log; `offset` is the number of steps in earlier stages."""
        metrics = {k: v for k, v in record.items() if k not in ("stage", "step")}
        self._log.append(record["stage"], record["step"], offset + record["step"], metrics)
        self._trains = True
        self._hang.is_over()

    def keep(self) -> None:
        """Copy the metrics log to storage."""
        if self._place is not None:
            write_atomic(self._place, self._log.path.read_bytes())

    def stop(self) -> bool:
        """Request a checkpoint from the workers; return whether there are training workers that can
        make it.
        """
        self._stops = True
        self._parts.clear()
        self._saved = 0
        return self._trains

    def stops(self) -> bool:
        """Whether the workers should make a checkpoint and stop."""
        return self._stops

    def saved(self, step: int, workers: int) -> None:
        """Record that a worker stored its part of a step's checkpoint."""
        self._parts[step] += 1
        if self._parts[step] == workers:
            self._saved = step
            del self._parts[step]

    def where(self, where: Where) -> None:
        """Record a worker's position report; soon after the first report of a hang, log a warning
        about all workers.
        """
        self._hang.take(where)
        if where.place and self._telling is None:
            self._telling = threading.Timer(_TOGETHER_SECONDS, self._tell)
            self._telling.daemon = True
            self._telling.start()

    def hang(self) -> str:
        """Describe the workers that wait and the workers they wait for, if the training hangs; else
        return an empty text.
        """
        return str(self._hang)

    def _tell(self) -> None:
        self._telling = None
        if told := self.hang():
            logger.warning("%s", told)

    def saved_step(self) -> int:
        """Return the step of the last complete checkpoint since the stop request (or since the
        start without one); 0 if none.
        """
        return self._saved

"""Progress lines in the driver's log during a stage, from the run's metrics log."""

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

from rayembed.config.train_loop import TrainLoopConfig
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.dropped import mean_of_finite
from rayembed.training.trainer import StepRecord

logger = logging.getLogger(__name__)


class Progress:
    """Logs the progress of a stage: step, loss, rate, time left, and changes of the number of
    workers. Until the first step it tells every few seconds that none is there yet.

    Rates and the time left are those of the last steps of this submission without its first one,
    which waits for first batches and for kernels that are made ready.
    """

    def __init__(
        self, stage: TrainLoopConfig, metrics_log: Path, every_seconds: float = 10.0
    ) -> None:
        self._stage, self._log, self._every = stage, MetricsLog(metrics_log), every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._since = self._seen = 0.0
        self._workers: float | None = None
        self._shown: StepRecord | None = None

    def __enter__(self) -> None:
        logger.info("stage %s: %d steps", self._stage.name, self._stage.steps)
        self._began = time.monotonic()
        for record in self._records()[-1:]:  # of an earlier submission
            self._since = self._seen = record["time"]
            self._workers = record.get("workers")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show()

    def _records(self) -> list[StepRecord]:
        """Steps of this submission."""
        mine = [r for r in self._log.records() if r["stage"] == self._stage.name]
        return [record for record in mine if record["time"] > self._since]

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            if not self._show():
                seconds = time.monotonic() - self._began
                logger.info("stage %s: no step yet after %.0f s", self._stage.name, seconds)

    def _tell_workers(self, record: StepRecord) -> None:
        workers = record.get("workers", self._workers)  # logs of earlier versions have none
        if self._workers not in (None, workers):
            logger.info(
                "stage %s: %d instead of %d workers from step %d on",
                *(self._stage.name, workers, self._workers, record["step"]),
            )
        self._seen, self._workers = record["time"], workers

    def _show(self) -> bool:
        """Log the last step if it is a new one; whether there has been any."""
        mine = self._records()
        if not mine or mine[-1] == self._shown:
            return bool(mine)
        self._shown = last = mine[-1]
        for record in mine:
            if record["time"] > self._seen:
                self._tell_workers(record)
        recent, rows = (mine[1:] or mine)[-20:], self._stage.row_name
        seconds = sum(r["seconds"] for r in recent)
        dropped = last.get("dropped_steps", 0)  # logs of earlier versions have none
        left = (self._stage.steps - last["step"]) * seconds / len(recent)
        knows = len(mine) > 1 or not left
        logger.info(
            "stage %s  step %d/%d  loss %.3f  lr %.2e  %.1f %s/s  %.0f tokens/s%s%s",
            self._stage.name,
            last["step"],
            self._stage.steps,
            mean_of_finite([r["loss"] for r in mine[-20:]]),
            last["learning_rate"],
            sum(r[f"{rows}_per_second"] for r in recent) / len(recent),
            rows,
            sum(r["tokens"] for r in recent) / seconds,
            f"  {timedelta(seconds=round(left))} left" if knows else "",
            f"  {dropped:.0f} dropped" if dropped else "",
        )
        return True

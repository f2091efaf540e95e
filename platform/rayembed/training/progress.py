"""Progress lines in the driver's log during a stage, from the run's metrics log."""

import logging
import threading
from datetime import timedelta
from pathlib import Path

from rayembed.config.train_loop import TrainLoopConfig
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.dropped import mean_of_finite
from rayembed.training.trainer import StepRecord

logger = logging.getLogger(__name__)


class Progress:
    """Logs the progress of a stage: step, loss, rate, time left, and changes of the number of
    workers.
    """

    def __init__(
        self, stage: TrainLoopConfig, metrics_log: Path, every_seconds: float = 15.0
    ) -> None:
        self._stage, self._log, self._every = stage, MetricsLog(metrics_log), every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._seen = 0.0
        self._workers: float | None = None

    def __enter__(self) -> None:
        logger.info("stage %s: %d steps; starting workers", self._stage.name, self._stage.steps)
        for record in self._records()[-1:]:  # of an earlier submission
            self._seen, self._workers = record["time"], record.get("workers")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show(self._records())

    def _records(self) -> list[StepRecord]:
        return [r for r in self._log.records() if r["stage"] == self._stage.name]

    def _watch(self) -> None:
        shown = 0
        while not self._stop.wait(self._every):
            records = self._records()
            if records and records[-1]["step"] != shown:
                shown = records[-1]["step"]
                self._show(records)

    def _tell_workers(self, record: StepRecord) -> None:
        workers = record.get("workers", self._workers)  # logs of earlier versions have none
        if self._workers not in (None, workers):
            logger.info(
                "stage %s: %d instead of %d workers from step %d on",
                *(self._stage.name, workers, self._workers, record["step"]),
            )
        self._seen, self._workers = record["time"], workers

    def _show(self, mine: list[StepRecord]) -> None:
        if not mine:
            return
        for record in mine:
            if record["time"] > self._seen:
                self._tell_workers(record)
        recent = mine[-20:]
        rows = self._stage.row_name
        seconds = sum(r["seconds"] for r in recent) / len(recent)
        dropped = mine[-1].get("dropped_steps", 0)  # logs of earlier versions have none
        left = timedelta(seconds=round((self._stage.steps - mine[-1]["step"]) * seconds))
        logger.info(
            "stage %s  step %d/%d  loss %.3f  lr %.2e  %.1f %s/s  %.0f tokens/s  %s left%s",
            self._stage.name,
            mine[-1]["step"],
            self._stage.steps,
            mean_of_finite([r["loss"] for r in recent]),
            mine[-1]["learning_rate"],
            sum(r[f"{rows}_per_second"] for r in recent) / len(recent),
            rows,
            sum(r["tokens"] for r in recent) / sum(r["seconds"] for r in recent),
            left,
            f"  {dropped:.0f} dropped" if dropped else "",
        )

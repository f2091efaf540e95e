"""Lines in the driver's log while a stage is trained, from the run's metrics log."""

import logging
import threading
from datetime import timedelta
from pathlib import Path

from rayembed.config.stage import StageConfig
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.loop import StepRecord

logger = logging.getLogger(__name__)


class Progress:
    """Lines in the driver's log while a stage is trained: step, loss, rate, time left."""

    def __init__(self, stage: StageConfig, metrics_log: Path, every_seconds: float = 15.0) -> None:
        self._stage, self._log, self._every = stage, MetricsLog(metrics_log), every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> None:
        logger.info("stage %s: %d steps; starting workers", self._stage.name, self._stage.steps)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show(self._log.records())

    def _watch(self) -> None:
        shown = 0
        while not self._stop.wait(self._every):
            records = [r for r in self._log.records() if r["stage"] == self._stage.name]
            if records and records[-1]["step"] != shown:
                shown = records[-1]["step"]
                self._show(records)

    def _show(self, records: list[StepRecord]) -> None:
        mine = [r for r in records if r["stage"] == self._stage.name]
        if not mine:
            return
        recent = mine[-20:]
        seconds = sum(r["seconds"] for r in recent) / len(recent)
        left = timedelta(seconds=round((self._stage.steps - mine[-1]["step"]) * seconds))
        logger.info(
            "stage %s  step %d/%d  loss %.3f  lr %.2e  %.1f pairs/s  %.0f tokens/s  %s left",
            self._stage.name,
            mine[-1]["step"],
            self._stage.steps,
            sum(r["loss"] for r in recent) / len(recent),
            mine[-1]["learning_rate"],
            sum(r["pairs_per_second"] for r in recent) / len(recent),
            sum(r["tokens"] for r in recent) / sum(r["seconds"] for r in recent),
            left,
        )

"""Log the progress of a stage in the driver, which reads it from the run's metrics log."""

import logging
from contextlib import ExitStack
from pathlib import Path

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.display.progress import SILENCE_SECONDS, bar, detail, doing, duration
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.dropped import mean_of_finite
from rayembed.training.trainer import StepRecord

logger = logging.getLogger(__name__)


class Progress:
    """Logs a stage's step, loss, speed, remaining time, and changes of the number of
    workers.

    Rates and the time left are those of the last steps of this submission without its first one,
    which waits for first batches and for kernels that are made ready.
    """

    def __init__(
        self, stage: TrainLoopConfig, metrics_log: Path, every_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._stage, self._log, self._every = stage, MetricsLog(metrics_log), every_seconds
        self._doing = ExitStack()
        self._since = self._seen = 0.0
        self._workers: float | None = None

    def __enter__(self) -> None:
        logger.info("stage %s begins: %d steps", self._stage.name, self._stage.steps)
        for record in self._records()[-1:]:  # of an earlier submission
            self._since = self._seen = record["time"]
            self._workers = record.get("workers")
        told = doing(self._text, tells_end=True, silence_seconds=self._every)
        self._doing.enter_context(told)

    def __exit__(self, *_: object) -> None:
        self._doing.close()

    def _records(self) -> list[StepRecord]:
        """Return the stage's logged steps since this run was submitted."""
        mine = [r for r in self._log.records() if r["stage"] == self._stage.name]
        return [record for record in mine if record["time"] > self._since]

    def _tell_workers(self, record: StepRecord) -> None:
        workers = record.get("workers", self._workers)
        if self._workers not in (None, workers):
            logger.info(
                "stage %s: %d instead of %d workers from step %d on",
                *(self._stage.name, workers, self._workers, record["step"]),
            )
        self._seen, self._workers = record["time"], workers

    def _text(self) -> str:
        """Describe the last finished step, or say that none has finished yet."""
        mine, stage = self._records(), self._stage
        if not mine:
            return f"stage {stage.name}: no step yet"
        for record in mine:
            if record["time"] > self._seen:
                self._tell_workers(record)
        last, recent, rows = mine[-1], (mine[1:] or mine)[-20:], stage.row_name
        detail(f"{last['step']}/{stage.steps}")
        seconds = sum(r["seconds"] for r in recent)
        dropped = last.get("dropped_steps", 0)
        left = (stage.steps - last["step"]) * seconds / len(recent)
        rate = sum(r[f"{rows}_per_second"] for r in recent) / len(recent)
        parts = [
            f"stage {stage.name}  {bar(last['step'], stage.steps)}",
            f"step {last['step']}/{stage.steps}",
            f"loss {mean_of_finite([r['loss'] for r in mine[-20:]]):.3f}",
            f"lr {last['learning_rate']:.2e}",
            f"{rate:.1f} {rows}/s",
            f"{sum(r['tokens'] for r in recent) / seconds:.0f} tokens/s",
        ]
        parts += [f"{duration(left)} left"] if len(mine) > 1 or not left else []
        parts += [f"{dropped:.0f} dropped"] if dropped else []
        return "  ".join(parts)

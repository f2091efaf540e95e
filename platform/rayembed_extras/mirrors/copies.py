"""Copy a run's training curves to TensorBoard and Weights & Biases, in addition to MLflow.

The metrics log is what counts: whatever keeps such a copy from being written is a warning.
"""

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rayembed.config.reports import MirrorKind
from rayembed.config.run import Run
from rayembed.registry.metrics_log import KEYS, LogReader, Record, record_of

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0


class Writer(Protocol):
    """Interface of a tracker to which curves are copied."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step of the run."""

    def close(self) -> None:
        """Send pending values."""


class TensorBoard:
    """Writes TensorBoard event files in the run's folder; each submission rewrites them from the
    metrics log.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(place))
        logger.info(
            "to show the curves of this run in TensorBoard, run: tensorboard --logdir %s", place
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write pending values."""
        self._writer.close()


class WandB:
    """Writes a Weights & Biases run, which later submissions continue; `WANDB_…` variables
    configure it.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        import wandb

        # A name that is used in two storages is two runs.
        name = hashlib.sha256(f"{run.fingerprint} {folder.absolute()}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=run.placement.experiment,
            name=run.name,
            id=name,
            dir=str(folder),
            resume="allow",
            config=run.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="global_step")
        self._sent = int(self._run.summary.get("global_step") or 0)
        if self._run.url:
            logger.info("the curves of this run in Weights & Biases: %s", self._run.url)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step, unless an earlier submission has sent it."""
        if step > self._sent:
            self._run.log({**values, "global_step": step})

    def close(self) -> None:
        """Send pending values."""
        self._run.finish(quiet=True)


class Copy:
    """Follows a run's metrics log in a thread and copies the curves to one tracker."""

    def __init__(self, make: Callable[[Run, Path], Writer], run: Run, folder: Path, log: Path):
        self._writer: Writer | None = None
        self._reader = LogReader(log, record_of)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        try:
            self._writer = make(run, folder)
        except Exception as error:  # noqa: BLE001 # of a library, its server or a login
            name = make.__name__
            logger.warning("cannot copy this run's curves to %s: %s", name, error)
        else:
            self._thread.start()

    def log_scores(self, name: str, scores: Mapping[str, float], step: int) -> None:
        """Log scores as `<name>/<task>` at a step of the run."""
        self._write([({f"{name}/{task}": value for task, value in scores.items()}, step)])

    def close(self) -> None:
        """Send the rest of the log and stop."""
        self._stop.set()
        if self._writer is not None:
            self._thread.join()
            self._pass_on()
        if self._writer is not None:
            self._safely(self._writer.close)

    def _follow(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._pass_on()

    def _pass_on(self) -> None:
        records = self._reader.read()
        self._write([(_metrics(record), int(record["global_step"])) for record in records])

    def _write(self, points: Sequence[tuple[Mapping[str, float], int]]) -> None:
        with self._lock:
            for values, step in points:
                if self._writer is not None:
                    self._safely(self._writer.write, values, step)

    def _safely(self, call: Callable[..., None], *given: Any) -> None:
        try:
            call(*given)
        except Exception as error:  # noqa: BLE001 # of a library or its server
            if not self._stop.is_set():
                logger.warning("a copy of the run's curves cannot be written: %s", error)
                self._writer = None


TENSORBOARD = MirrorKind("tensorboard", partial(Copy, TensorBoard))
WANDB = MirrorKind("wandb", partial(Copy, WandB))


def _metrics(record: Record) -> dict[str, float]:
    values = {f"train/{name}": value for name, value in record.items() if name not in KEYS}
    return {name: value for name, value in values.items() if math.isfinite(value)}

"""Trainer callbacks of a stage: keep checkpoints, write weights, submit weights for validation,
react to preemption.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rayembed.config.run_evaluation import EarlyStoppingConfig
from rayembed.distributed.collectives import largest, rank
from rayembed.training.checkpoints.checkpoint_list import checkpoint_name
from rayembed.training.checkpoints.weights import write_weights
from rayembed.training.trainer import Callback, Engine, StageTrainer, StepRecord
from rayembed.training.validation.decision import choose
from rayembed.training.validation.folder import STEP, ValidationFolder

LOOK_SECONDS = 5.0

_MOST_STEPS = 8
"""Steps between two questions at most: each is a message for which all workers' hosts wait, and
steps may become slower than those before."""


class KeepCheckpoints(Callback):
    """Keeps every checkpoint as `step-<number>` in a local folder that all workers use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Store the device that workers use to communicate."""
        self._device = trainer.device

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Copy this worker's part of the checkpoint, and wait until all workers have copied
        theirs.
        """
        shutil.copytree(folder, self._folder / checkpoint_name(step), dirs_exist_ok=True)
        largest(0, self._device)


class WriteWeights(Callback):
    """Writes the trained weights to storage when the stage ends.

    Args:
        made_of: record of their inputs.
    """

    def __init__(self, path: str, made_of: Mapping[str, str]) -> None:
        self._path, self._made_of = path, made_of

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Store the engine, which has the weights."""
        self._engine = trainer.engine

    def on_train_end(self) -> None:
        """Write the engine's trained weights."""
        state = whole_weights(self._engine)
        if rank() == 0:
            write_weights(self._path, state, self._made_of)


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """Collect the full trained weights on worker 0's CPU (the others get none); all workers must
    call it together.
    """
    return {name: w.cpu().clone() for name, w in engine.trainable_weights() if rank() == 0}


class Preemption(Callback):
    """Requests a checkpoint when a node is about to be removed or the run is stopped, and whenever
    the last checkpoint is too old.

    Args:
        announced: whether this worker knows it; all workers ask together, and it counts if one of
            them does.
        look_seconds: least time from one question to the next.
        every_minutes: most minutes from one checkpoint to the next; None: any.
        stored: returns when the checkpoint that was made last is in storage; asked after that of an
            announced end, which leaves no time for steps beside an upload.
    """

    def __init__(
        self,
        announced: Callable[[], bool],
        look_seconds: float = LOOK_SECONDS,
        every_minutes: float | None = None,
        stored: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask, self._every = announced, look_seconds
        self._old = math.inf if every_minutes is None else 60 * every_minutes
        self._announced = False
        self._stored = stored

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Start measuring the time since the last checkpoint."""
        self._device = trainer.device
        self._looked = self._saved = self._asked = time.monotonic()
        self._asked_step = self._next_step = step

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Record the time of this checkpoint; if the end of training is announced, wait until it is
        uploaded.
        """
        self._saved = time.monotonic()
        if self._announced:
            self._stored()

    def should_save(self, step: int) -> bool:
        """Whether a stop or a node's removal was announced, or the last checkpoint is too
        old.

        The same on all workers. Quick steps are not all asked.
        """
        if step < self._next_step:
            return False
        # Worker 0's clocks decide, so that all ask, and save, after the same step.
        now = time.monotonic()
        asks = not self._announced and now - self._looked >= self._every
        due = int(asks) + 2 * int(now - self._saved >= self._old)
        told = largest(
            due + 4 * self._steps_until_next(step, now) if rank() == 0 else 0, self._device
        )
        steps, due = divmod(told, 4)
        self._next_step, self._asked_step, self._asked = step + steps, step, now
        if due & 1:
            self._looked = now
            self._announced = bool(largest(int(self._ask()), self._device))
            return self._announced or due > 1
        return due > 1

    def _steps_until_next(self, step: int, now: float) -> int:
        """Estimate the number of steps that fit into half of the shortest time between two checks,
        from the speed of recent steps.
        """
        seconds = (now - self._asked) / max(step - self._asked_step, 1)
        return min(max(int(self._every / 2 / max(seconds, 1e-6)), 1), _MOST_STEPS)


class WorkerValidation(Callback):
    """Submits weights for validation, and ends the stage when its early-stopping rule says
    so.

    Args:
        folder: the stage's.
        steps: those that are to have a score.
        made_of: record of the weights' inputs.
    """

    def __init__(
        self,
        folder: ValidationFolder,
        steps: Sequence[int],
        stopping: EarlyStoppingConfig | None,
        made_of: Mapping[str, str],
    ) -> None:
        self._folder, self._steps, self._stopping = folder, frozenset(steps), stopping
        self._made_of = made_of
        self._scores: dict[int, float | None] = {}
        self._submitted = False

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Store the engine; the weights of the current step count as submitted already."""
        self._engine, self._device, self._start = trainer.engine, trainer.device, step
        self._done, self._submitted = step, True

    def on_step_end(self, record: StepRecord) -> None:
        """Record the step, and that its weights are not submitted yet."""
        self._done, self._submitted = record["step"], False

    def on_train_end(self) -> None:
        """Submit the last weights if another callback ended the stage between validated steps."""
        if not self._submitted:
            self._submit(self._done)

    def should_stop(self, step: int) -> bool:
        """Submit the step's weights if they must be validated; return whether the scores so far end
        the stage.
        """
        if step != self._start:
            if step not in self._steps:
                return False
            self._submit(step)
        if self._stopping is None:
            return False
        ended = rank() == 0 and self._ends_by(step)
        return bool(largest(int(ended), self._device))

    def _submit(self, step: int) -> None:
        state = whole_weights(self._engine)
        if rank() == 0:
            self._folder.submit(step, state, {**self._made_of, STEP: str(step)})
        self._submitted = True

    def _ends_by(self, step: int) -> bool:
        """Whether the scores of steps up to this one end the stage; later scores, left from before
        a restart, are ignored. Those of later steps may lie there from before this training went on
        from a checkpoint.
        """
        recorded = self._folder.steps()[1]
        for other in sorted(recorded - self._scores.keys()):
            record = self._folder.read(other) if other <= step else None
            if record is not None:
                self._scores[other] = record.score
        choice = choose(self._scores, self._steps, self._stopping)
        return choice.ends_at is not None

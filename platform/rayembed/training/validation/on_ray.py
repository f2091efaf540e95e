"""Run validation as Ray tasks while a stage trains; the driver starts and collects them.

Not by Ray Train's own `ValidationConfig` (alpha in Ray 2.60): there a validation process that dies,
as for want of memory, ends the training (measured: `ControllerError`); what is scored is a whole
checkpoint with optimiser states, for full training six times as large as weights in bf16; and
scores go with the checkpoints that are removed, while early stopping needs them all.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from rayembed.config.run import Run
from rayembed.errors import RayembedError
from rayembed.training.memory.capacity import validation_resources
from rayembed.training.validation.folder import ValidationFolder
from rayembed.training.validation.scoring import Validation, ValidationScoring

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_RETRIES = 1
"""Number of retries of a task that was lost with its process or node."""


@dataclass(frozen=True)
class _Task:
    step: int
    content: str
    began: float


class ValidationOnRay:
    """Scores a stage's weights in Ray tasks while the code in its `with` block trains the
    stage.

    Leaving the block ends what runs; `finish` takes what is still to be scored.

    Args:
        stage_index: of `run.stages`.
        stage_folder: in storage.
    """

    def __init__(
        self, run: Run, stage_index: int, stage_folder: str, validation: Validation
    ) -> None:
        self._run, self._validation = run, validation
        self._folder = ValidationFolder(stage_folder)
        self._scoring = ValidationScoring.of(run, stage_index, self._folder, validation)
        self._running: dict[Any, _Task] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="validation", daemon=True)

    def __enter__(self) -> "ValidationOnRay":
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if error is not None:
            self._cancel_all()

    def finish(self, target: str) -> int:
        """Wait for all scores that matter, and move the chosen step's weights to `target`; return
        the step.

        Called when the stage's workers are done, which have freed their CPUs and GPUs.

        Raises:
            ArtifactError: the storage refuses what it must do.
        """
        self._scoring.training_is_done()
        if not self._scoring.choice.settled:
            logger.info("waiting for validation scores")
        while not self._scoring.choice.settled:
            self._advance()
            if self._running:
                ray.wait(list(self._running), timeout=_POLL_SECONDS)
        self._cancel_all()
        return self._scoring.promote(target)

    def _watch(self) -> None:
        warned = False
        while not self._stop.wait(_POLL_SECONDS):
            try:
                self._advance()
                self._scoring.tidy()
            except (RayembedError, OSError, ray.exceptions.RayError) as error:
                # Training does not end for its sake, and `finish` tells what still fails then.
                if not warned:
                    logger.warning("a validation task failed and is tried again: %s", error)
                warned = True
            else:
                warned = False

    def _advance(self) -> None:
        """Collect the scores of finished tasks, and start tasks for the next steps."""
        if self._running:
            done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            for reference in done:
                self._take(reference)
        self._end_overdue()
        running = {task.step for task in self._running.values()}
        free = self._run.placement.validations_at_once - len(running)
        for step in self._scoring.due(running)[: max(0, free)]:
            self._start(step)

    def _start(self, step: int) -> None:
        wanted = validation_resources(self._run.placement)
        task = ray.remote(
            num_cpus=wanted["CPU"], num_gpus=wanted.get("GPU", 0), max_retries=_RETRIES
        )(_score)
        content = self._folder.content(step)
        reference = task.remote(self._validation.score, self._run, self._folder.weights(step))
        self._running[reference] = _Task(step, content, time.monotonic())

    def _take(self, reference: Any) -> None:
        task = self._running.pop(reference)
        seconds = time.monotonic() - task.began
        try:
            scores, seconds = ray.get(reference)
        except ray.exceptions.RayError as error:
            problem = getattr(error, "cause", None) or error
            first = str(problem).strip().partition("\n")[0]
            described = f"{type(problem).__name__}: {first}"
            self._scoring.failed(task.step, task.content, described, seconds)
        else:
            self._scoring.scored(task.step, task.content, scores, seconds)

    def _end_overdue(self) -> None:
        minutes = self._run.placement.validation_minutes
        for reference, task in list(self._running.items()):
            seconds = time.monotonic() - task.began
            if minutes is not None and seconds > 60 * minutes:
                del self._running[reference]
                ray.cancel(reference, force=True)
                problem = (
                    f"it took longer than placement.validation_minutes={minutes:g}, the wait for "
                    "its CPUs and GPUs included"
                )
                self._scoring.failed(task.step, task.content, problem, seconds)

    def _cancel_all(self) -> None:
        for reference in self._running:
            ray.cancel(reference, force=True)
        self._running.clear()


def _score(
    score: Callable[[Run, str, str], dict[str, float]], run: Run, weights: str
) -> tuple[dict[str, float], float]:
    """Ray task: score weights on the validation tasks; return the scores and the seconds it
    took.
    """
    import torch

    logging.basicConfig(level="WARNING", format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    wanted = validation_resources(run.placement)
    of_task = max(1, int(wanted["CPU"]))
    torch.set_num_threads(run.placement.threads if run.placement.threads_per_worker else of_task)
    began = time.monotonic()
    scores = score(run, weights, "cuda" if wanted.get("GPU") else "cpu")
    return scores, time.monotonic() - began

"""Validation logic in the driver: which step to score next, what to record, which weights to
choose.

Knows no Ray: `on_ray.py` runs the tasks and brings what came of them.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rayembed.config.run import Run
from rayembed.config.run_evaluation import ValidationConfig
from rayembed.errors import ArtifactError
from rayembed.training.validation.decision import (
    Choice,
    Scores,
    choose,
    promoted_step,
    still_needed,
    validated_steps,
)
from rayembed.training.validation.folder import ValidationFolder, ValidationResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validation:
    """Functions that score a stage's weights, provided by code that knows models and tasks."""

    score: Callable[[Run, str, str], dict[str, float]]
    """Score by task, of (run, path of weights in storage, torch's device); it may run in another
    process."""
    data: str
    """Fingerprint of the validation data."""
    deciding: Callable[[Mapping[str, float]], float]
    """Function from scores by task to the deciding score; higher is better."""
    on_scored: Callable[[ValidationResult], None]
    """Callback in the driver for each scored step."""


class ValidationScoring:
    """Records the scores of one stage's steps, and decides what to score next and which weights to
    pass on. Made before its workers start, used by one thread at a time.

    Args:
        steps: those that are to have a score.
        validation: hears at first of steps that are scored already: a process that was killed may
            not have told it.

    Raises:
        ArtifactError: scores that lie there were taken on other data.
    """

    def __init__(
        self,
        stage: str,
        folder: ValidationFolder,
        steps: Sequence[int],
        config: ValidationConfig,
        validation: Validation,
    ) -> None:
        self._stage, self._folder, self._steps, self._config = stage, folder, tuple(steps), config
        self._validation, self._data = validation, validation.data
        self._records = {s: r for s, r in folder.records().items() if s in self._steps}
        self._absent: set[int] = set()
        for record in self._records.values():
            if record.data != self._data:
                raise ArtifactError(
                    f"stage {stage!r}: step {record.step} was scored on the validation data "
                    f"{record.data!r}, but now they are {self._data!r}: the validation's "
                    "texts or mteb's version have changed since. Restore them, or give "
                    "this run another --name"
                )
            if record.score is not None:
                validation.on_scored(record)

    @classmethod
    def of(
        cls, run: Run, number: int, folder: ValidationFolder, validation: Validation
    ) -> "ValidationScoring":
        """Make the validation of a run's stage `number`, whose weights are in `folder`."""
        config, stage = run.evaluation.validation, run.stages[number]
        assert config is not None
        steps = validated_steps(stage.steps, run.validation_interval(stage))
        return cls(stage.name, folder, steps, config, validation)

    @property
    def choice(self) -> Choice:
        """Best step so far by the scores that exist, and whether the stage ends."""
        return choose(self._scores(), self._steps, self._config.early_stopping)

    def due(self, running: Collection[int]) -> list[int]:
        """Return the steps whose weights wait to be scored, in order.

        Of a step that workers came by again with other weights the former score is forgotten.
        """
        there, recorded = self._folder.steps()
        for step in self._records.keys() - recorded:
            del self._records[step]
        if self.choice.ends_at is not None:
            return []
        waiting = (there & set(self._steps)) - self._records.keys() - set(running)
        return sorted(waiting)

    def scored(self, step: int, content: str, scores: Mapping[str, float], seconds: float) -> None:
        """Store the scores of a step's weights, and log them with the best step so far."""
        bad = sorted(task for task, score in scores.items() if not math.isfinite(score))
        if bad:
            self.failed(step, content, f"the score of {', '.join(bad)} is not a number", seconds)
            return
        score = self._validation.deciding(scores)
        record = ValidationResult(step, content, self._data, score, dict(scores), seconds)
        if not self._keep(record):
            return
        by_task = ", ".join(f"{task} {value:.4f}" for task, value in scores.items())
        by_task = f" ({by_task})" if len(scores) > 1 else ""
        logger.info(
            "stage %s  step %d  validation %.4f%s, %.1f s; best so far: step %s",
            *(self._stage, step, score, by_task, seconds, self.choice.step),
        )
        self._validation.on_scored(record)

    def failed(self, step: int, content: str, problem: str, seconds: float) -> None:
        """Record that a step's weights could not be scored. Another submission does not try again,
        so that it chooses as this one does.
        """
        if self._keep(ValidationResult(step, content, self._data, None, {}, seconds, problem)):
            logger.warning(
                "stage %s: the weights of step %d could not be scored, and training "
                "continues without that validation score: %s",
                *(self._stage, step, problem),
            )

    def tidy(self) -> None:
        """Remove weights that will neither be scored nor passed on to the next stage."""
        there = self._folder.steps()[0]
        config = self._config
        needed = still_needed(
            there, self._scores(), self._steps, config.early_stopping, config.keep
        )
        for step in sorted(there - needed):
            record = self._records.get(step)
            # Other weights than those scored were put there just now: they are to be scored.
            if record is None or record.content == self._folder.content(step):
                self._folder.remove(step)

    def training_is_done(self) -> None:
        """Record that no further weights will come, so that steps without stored weights get no
        score.

        A run that was begun without validation, or with scores at other steps, has such.
        """
        there, recorded = self._folder.steps()
        self._absent = set(self._steps) - there - recorded

    def promote(self, target: str) -> int:
        """Move the chosen step's weights to `target` and remove the others; return the step."""
        there = self._folder.steps()[0]
        choice = self.choice
        step = promoted_step(choice, self._steps, self._config.keep)
        if step not in there:
            # After a restart with another number of workers an earlier step may be the best again
            # when its weights, which were not then, have been removed.
            left = {s: r.score for s, r in self._records.items() if s in there}
            best = None if self._config.keep == "last" else choose(left, left).step
            gone, step = step, best or max(there)
            logger.warning(
                "stage %s: the weights of step %d are lost, because workers restarted from "
                "an earlier step; the weights of step %d, the best that remain, are used",
                *(self._stage, gone, step),
            )
        elif choice.step is None:
            logger.warning(
                "stage %s: no step has a validation score, so the stage ends with its last weights",
                self._stage,
            )
        logger.info("stage %s ends with the weights of step %d", self._stage, step)
        for other in sorted(there - {step}):
            self._folder.remove(other)
        self._folder.promote(step, target)  # last: it says that the stage is done
        return step

    def _scores(self) -> Scores:
        known: dict[int, float | None] = dict.fromkeys(self._absent)
        return known | {step: record.score for step, record in self._records.items()}

    def _keep(self, record: ValidationResult) -> bool:
        """Write the record unless the step's weights have been replaced by others since; return
        whether it was written.
        """
        if record.content != self._folder.content(record.step):
            logger.info(
                "training reached step %d again with other weights, so the former "
                "validation score of that step is discarded",
                record.step,
            )
            return False
        self._folder.write(record)
        self._records[record.step] = record
        return True

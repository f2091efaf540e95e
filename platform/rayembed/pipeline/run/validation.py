"""Connect a run's validation with its training: model, tasks and MLflow."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rayembed.assets.storage import write_atomic
from rayembed.config.run import Run
from rayembed.evaluation.validation import (
    data_revision,
    deciding_score,
    validate,
    validation_factories,
    validation_tasks,
)
from rayembed.models.adapters.lora import merge_lora
from rayembed.pipeline.run.held_out import HeldOutSet, with_sets
from rayembed.registry.metrics_log import LogReader, Record
from rayembed.training.checkpoints.weights import load_weights, read_made_of
from rayembed.training.validation.folder import STEP, ValidationFolder, ValidationResult
from rayembed.training.validation.scoring import Validation

VALIDATION_FILE = "validation.jsonl"
"""Name of the log of all scores in a run's folder: a line for each step that was scored, in the
order of steps, with `stage`, `step`, `global_step`, `score` and the `scores` by task."""

SCORE = "score"
"""Name of the mean that decides, beside the tasks of a curve."""


def check_validated(run: Run, held_out: Sequence[HeldOutSet]) -> None:
    """Check that the held-out data, if validation uses it, is small enough to be scored during
    training.

    Args:
        held_out: sets over the held-out parts, which are known when the data are prepared.

    Raises:
        DataError: they are too large.
    """
    if run.evaluation.validation is not None:
        validation_factories(with_sets(run, held_out))


def validation_of(
    run: Run,
    held_out: Sequence[HeldOutSet],
    offset: int,
    log_scores: Callable[[str, dict[str, float], int], None],
) -> Validation | None:
    """Make the object that validates a stage's weights; None if the run has no validation.

    Args:
        held_out: sets over the held-out parts of the run's data sets.
        offset: steps of the stages before.
        log_scores: takes the name of a curve, scores and the step of the run.

    Raises:
        RayembedError: as `validation_tasks`.
    """
    config = run.evaluation.validation
    if config is None:
        return None

    def on_scored(record: ValidationResult) -> None:
        assert record.score is not None
        values = {**record.scores, SCORE: record.score}
        log_scores("validation", values, offset + record.step)

    deciding = partial(deciding_score, weights=config.weights)
    data = data_revision(validation_tasks(with_sets(run, held_out)))
    return Validation(partial(score_weights, held_out), data, deciding, on_scored)


def score_weights(
    held_out: Sequence[HeldOutSet], run: Run, weights: str, device: str
) -> dict[str, float]:
    """Load trained weights from storage and score the model on the validation tasks, by
    task.

    The weights are whole whatever the ZeRO stage, so one process on one device takes them. Adapters
    are merged, as they are in the model that will be exported.

    Args:
        held_out: as in `validation_of`.

    Raises:
        RayembedError: backbone, weights or tasks cannot be had.
    """
    model = load_weights(run, weights).to(device)
    merge_lora(model)
    return validate(model, with_sets(run, held_out))


def kept_step(weights: str) -> str | None:
    """Step whose weights a stage passed on as the best; None if it passed on the last ones without
    validation.
    """
    return read_made_of(weights).get(STEP)


def validation_log(run: Run, stage_folder: Callable[[str], str]) -> list[Record]:
    """Collect the run's validation scores so far as lines of `VALIDATION_FILE`; steps without
    scores are left out.

    Args:
        stage_folder: a stage's folder in storage by its name.
    """
    lines: list[Record] = []
    offset = 0
    for stage in run.stages:
        for step, record in ValidationFolder(stage_folder(stage.name)).records().items():
            if record.score is not None:
                told = {"stage": stage.name, "step": step, "global_step": offset + step}
                lines.append({**told, "score": record.score, "scores": record.scores})
        offset += stage.steps
    return lines


def write_validation_log(lines: Sequence[Record], path: Path) -> None:
    """Write the validation log; a run without scores gets no file."""
    if lines:
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def read_validation_log(path: Path) -> list[Record]:
    """Read the lines of a run's validation log; empty if there is no log."""
    return LogReader(path).read()

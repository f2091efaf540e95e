"""Validation files in a stage's storage folder: weights to score, and their scores.

    validation/step-0000200.safetensors    trainable weights after 200 steps, by worker 0
    validation/step-0000200.json           their score or why there is none, by the driver

Weights without a score are to be scored; a killed run finds here what it still has to do.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from rayembed.assets.storage import (
    exists,
    join,
    list_files,
    move_file,
    read_bytes,
    remove_file,
    write_atomic,
)
from rayembed.errors import ArtifactError
from rayembed.training.checkpoints.weights import tensors_digest, weights_digest, write_weights

FOLDER = "validation"

STEP = "step"
"""Key in the header of a file of weights: after which step of the stage they are."""

_WEIGHTS, _RECORD = ".safetensors", ".json"


@dataclass(frozen=True)
class ValidationResult:
    """Scores of one step's weights, or the reason why there is no score."""

    step: int
    content: str
    """Digest of the weights."""
    data: str
    """Fingerprint of the validation data."""
    score: float | None
    """Deciding score, higher is better; None if there is none."""
    scores: dict[str, float]
    """Scores by task."""
    seconds: float
    problem: str = ""
    """Reason why there is no score."""


class ValidationFolder:
    """Reads and writes the validation files of one stage.

    Args:
        stage_folder: in storage.
    """

    def __init__(self, stage_folder: str) -> None:
        self._folder = join(stage_folder, FOLDER)

    def weights(self, step: int) -> str:
        """Return the path of a step's weights."""
        return join(self._folder, f"step-{step:07d}{_WEIGHTS}")

    def submit(self, step: int, state: dict[str, Tensor], made_of: Mapping[str, str]) -> None:
        """Store weights for scoring, unless the same weights were scored already.

        A stage that goes on from a checkpoint comes by the same steps again: with as many workers
        its weights are bit for bit the same, with others they may not be.
        """
        record = self.read(step)
        if record is not None and record.content == tensors_digest(state):
            return
        write_weights(self.weights(step), state, made_of)
        if record is not None:  # only now, or the driver could score what lay there before
            remove_file(self._record(step))

    def content(self, step: int) -> str:
        """Read the digest of a step's stored weights."""
        return weights_digest(self.weights(step))

    def steps(self) -> tuple[set[int], set[int]]:
        """Return the steps with stored weights, and the steps with a record of scores."""
        names = list_files(self._folder, recursive=False)
        found: dict[str, set[int]] = {_WEIGHTS: set(), _RECORD: set()}
        for name in names:
            match = re.fullmatch(r"step-(\d+)(\.\w+)", name)
            if match is not None and match[2] in found:
                found[match[2]].add(int(match[1]))
        return found[_WEIGHTS], found[_RECORD]

    def read(self, step: int) -> ValidationResult | None:
        """Read a step's record of scores; None if it has none.

        Raises:
            ArtifactError: the file cannot be read.
        """
        path = self._record(step)
        if not exists(path):
            return None
        try:
            return ValidationResult(**json.loads(read_bytes(path)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"{path!r} holds no validation score: {error}; remove the file to have the "
                "weights scored again"
            ) from None

    def records(self) -> dict[int, ValidationResult]:
        """Read all records of scores, in the order of steps."""
        found = {step: self.read(step) for step in sorted(self.steps()[1])}
        return {step: record for step, record in found.items() if record is not None}

    def write(self, record: ValidationResult) -> None:
        """Write a step's record of scores."""
        assert record.score is None or math.isfinite(record.score)
        text = json.dumps(asdict(record), indent=1, sort_keys=True)
        write_atomic(self._record(record.step), text.encode())

    def remove(self, step: int) -> None:
        """Remove the weights of a step, but not its record of scores."""
        remove_file(self.weights(step))

    def promote(self, step: int, target: str) -> None:
        """Move the weights of a step to `target` in storage."""
        move_file(self.weights(step), target)

    def _record(self, step: int) -> str:
        return join(self._folder, f"step-{step:07d}{_RECORD}")

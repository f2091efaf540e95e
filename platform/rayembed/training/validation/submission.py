"""A worker's part in validation: it leaves weights to be scored, and ends when scores say so."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rayembed.config.validation import EarlyStoppingConfig
from rayembed.distributed.collectives import largest, rank
from rayembed.training.validation.decision import choose
from rayembed.training.validation.folder import ValidationFolder

STEP = "step"
"""Key in the header of a file of weights: after which step of the stage they are."""


class Engine(Protocol):
    """The methods of an engine that validation needs."""

    def trainable_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole weight, one after the other on all workers."""
        ...


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """Copies on the CPU on worker 0, nothing on the others; all workers must call it."""
    return {name: w.cpu().clone() for name, w in engine.trainable_weights() if rank() == 0}


class WorkerValidation:
    """Validation as one worker sees it.

    Args:
        folder: the stage's.
        steps: those that are to have a score.
        made_of: what the weights depend on.
        device: of messages between workers.
    """

    def __init__(
        self,
        folder: ValidationFolder,
        steps: Sequence[int],
        stopping: EarlyStoppingConfig | None,
        made_of: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._folder, self._steps, self._stopping = folder, frozenset(steps), stopping
        self._made_of, self._device = made_of, device
        self._scores: dict[int, float | None] = {}

    def after(self, step: int, engine: Engine) -> bool:
        """Whether the stage ends after the step, whose weights are left to be scored if they are to
        be; all workers must call it.
        """
        if step not in self._steps:
            return False
        state = whole_weights(engine)
        if rank() == 0:
            self._folder.submit(step, state, {**self._made_of, STEP: str(step)})
        return self.has_ended(step)

    def has_ended(self, step: int) -> bool:
        """Whether the scores of the steps up to this one end the stage; the same on all workers.

        Scores of later steps may lie there from before this training went on from a checkpoint.
        """
        if self._stopping is None:
            return False
        ended = rank() == 0 and self._ends_by(step)
        return bool(largest(int(ended), self._device))

    def _ends_by(self, step: int) -> bool:
        recorded = self._folder.steps()[1]
        for other in sorted(recorded - self._scores.keys()):
            record = self._folder.read(other) if other <= step else None
            if record is not None:
                self._scores[other] = record.score
        choice = choose(self._scores, self._steps, self._stopping)
        return choice.ends_at is not None

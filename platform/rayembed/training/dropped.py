"""Handling of dropped steps: steps that change no weight because loss or gradient is not
finite.

One NaN in an update would be in all weights after it. Such a step is dropped on all workers, for
every ZeRO stage and type alike: weights, moments and the optimiser's count of updates stay as they
are, and the next step has the learning rate and the batch that it would have had. What decides is
the norm of the gradient of all workers, which each of them has anyway: it is the same on all, and
it is not finite when one number of one worker is not. A loss that is not finite makes it so.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.errors import DivergenceError

logger = logging.getLogger(__name__)

_AT_THE_END = 2
"""Consecutive dropped steps at the end of a stage that end the run; a single one may be due to its
batch."""


def without_gradient_unless_finite(loss: Tensor) -> Tensor:
    """Return the loss such that its gradient is NaN if the loss is not finite; needs no
    synchronisation with the GPU.

    It asks no device for the loss.
    """
    return loss * torch.ones_like(loss).masked_fill(~loss.detach().isfinite(), math.nan)


def mean_of_finite(values: Sequence[float]) -> float:
    """Compute the mean of the finite values; NaN if none is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


class DroppedSteps:
    """Counts dropped steps: warns of the first one, and ends the run after too many consecutive
    ones.

    Args:
        limit: how many in a row.
        of_step: names what the batch of a step (from 0) was drawn from.
        count: those that were dropped before, up to the checkpoint that training goes on from.
        saved: step of that checkpoint; 0: there is none.
        tells: whether this worker is the one that warns.
        trace: option of the job that shows the rows of a step; empty: it has none.
    """

    def __init__(
        self,
        loop_config: TrainLoopConfig,
        limit: int,
        of_step: Callable[[int], str],
        *,
        count: int = 0,
        saved: int = 0,
        tells: bool = True,
        trace: str = "",
    ) -> None:
        self._course, self._limit, self._of_step = loop_config, limit, of_step
        self._saved, self._tells, self._trace = saved, tells, trace
        self.count = count
        """Number of dropped steps in the stage so far."""
        self.in_a_row = 0
        """Number of consecutive dropped steps up to the last step."""
        self._last = ""

    def note(self, step: int, loss: float, norm: float, rate: float) -> None:
        """Record whether a step (numbered from 1) was dropped."""
        if math.isfinite(norm):
            self.in_a_row = 0
            return
        self.count += 1
        self.in_a_row += 1
        self._last = f"loss {loss:.4g}, gradient norm {norm:.4g}, learning rate {rate:.3g}"
        if self.count == 1 and self._tells:
            logger.warning(
                "stage %s: step %d is dropped (%s; batch of %s), so it changes no weight. "
                "Further dropped steps are counted as dropped_steps; %d dropped steps in a "
                "row end the run.",
                *(self._course.name, step, self._last, self._of_step(step - 1), self._limit),
            )

    def saved(self, step: int) -> None:
        """Record that a checkpoint was made."""
        self._saved = step

    def check(self, step: int) -> None:
        """Raise after too many consecutive dropped steps, or if the last steps of the stage were
        dropped.

        Raises:
            DivergenceError: there were; the same on all workers.
        """
        is_last = step == self._course.steps
        if self.in_a_row < (min(self._limit, _AT_THE_END) if is_last else self._limit):
            return
        name, first = self._course.name, step - self.in_a_row + 1
        which = f"the steps {first} to {step} were" if first < step else f"step {step} was"
        kept = (
            f"The checkpoint of step {self._saved} is kept"
            if self._saved
            else "No checkpoint was made before"
        )
        raise DivergenceError(
            f"stage {name!r}: {which} dropped, because the loss or the gradient is not a "
            "finite number; "
            f"{'a stage cannot end with dropped steps' if is_last else 'so many end the run'} "
            f"(placement.end_after_dropped_steps={self._limit}). The last dropped step: "
            f"{self._last}, batch of {self._of_step(step - 1)}. {kept}; no weights were "
            "passed on. Most often the learning rate is too high: lower "
            "optimizer.learning_rate or raise optimizer.warmup_steps, and train under "
            f"another --name.{self._advice(step - 1)}"
        )

    def _advice(self, step: int) -> str:
        if not self._trace:
            return ""
        return (
            " If only some batches cause dropped steps, look at their rows (add "
            f"{self._trace} {self._course.name}:{step} to the training command) and remove "
            "the broken rows."
        )

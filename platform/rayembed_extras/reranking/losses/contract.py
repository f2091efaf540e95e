"""Base class of losses over lists of scores, and the data that a step passes to them.

Importing this module or that of a loss loads no torch, for settings are read where there is none.

L lists of this worker, M documents of the longest: the positive, then hard negatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rayembed.config.loss import LossConfig, Need

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class ScoredLists(NamedTuple):
    """Scores of lists; shorter lists are filled up to M documents."""

    scores_LM: Float[Tensor, "L M"]
    """Scores of the trained model, float32, before any sigmoid."""
    relevant_LM: Bool[Tensor, "L M"]
    """Mask of the positives."""
    there_LM: Bool[Tensor, "L M"]
    """Mask of the documents that exist."""
    teacher_LM: Float[Tensor, "L M"]
    """Scores that mining stored, all of a list by one model; NaN where there is none."""

    def taught(self) -> tuple[Float[Tensor, "L M"], Bool[Tensor, "L M"]]:
        """Return the teacher's scores, 0 where there is none, and the mask of documents that have
        one; no document of a list whose positive or whose negatives all have none.
        """
        known_LM = self.there_LM & ~self.teacher_LM.isnan()
        known_LM = known_LM & known_LM[:, :1] & known_LM[:, 1:].any(dim=1, keepdim=True)
        return self.teacher_LM.masked_fill(~known_LM, 0.0), known_LM


class ListLoss(LossConfig):
    """Base class for the settings of a loss over lists of scores; the step averages over lists."""

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss reads besides texts: none, unless it learns a teacher's scores."""
        return frozenset()

    @property
    def reads_in_batch(self) -> bool:
        """False: a list's loss depends on no other list."""
        return False

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the float32 loss of each list."""
        raise TypeError(f"{type(self).__name__} must define `of_lists`, which computes the loss")


class TaughtListLoss(ListLoss):
    """Base class of losses that learn the scores that mining stored, by a teacher or, where mining
    rescored, by a cross-encoder; a list without them adds nothing.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss reads besides texts: a teacher's scores."""
        return frozenset({"teacher_scores"})

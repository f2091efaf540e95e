"""Base classes of losses that learn from a teacher, combined with InfoNCE.

B queries, N candidates, M = 1 + K own documents of a query, D embedding width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from rayembed.config.loss import Need
from rayembed.losses.contract import Candidates, similarities
from rayembed.losses.infonce import WithInfoNCE

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rayembed.losses.contract import Parameters


class BesideInfoNCE(WithInfoNCE):
    """Base class of losses that add InfoNCE over all candidates to a distillation loss."""

    infonce_weight: NonNegativeFloat = 1.0
    """Factor of InfoNCE; 0 leaves the teacher alone."""
    infonce_temperature: PositiveFloat = 0.02
    """Temperature of InfoNCE."""

    @property
    def initial_temperature(self) -> float:
        """Temperature of InfoNCE as set."""
        return self.infonce_temperature

    @property
    def reads_candidates(self) -> bool:
        """Whether InfoNCE or the spread-out regulariser needs all candidates, besides the
        distillation loss.
        """
        return bool(self.infonce_weight or self.spread_out)

    @model_validator(mode="after")
    def _infonce_is_there(self) -> Self:
        names = ("directions", "hardness", "focal", "learnt_temperature")
        if not self.infonce_weight and (given := [n for n in names if getattr(self, n)]):
            raise ValueError(
                f"{', '.join(given)}: no effect, because it changes InfoNCE only and "
                "infonce_weight is 0; remove the setting, or set infonce_weight above 0"
            )
        return self

    @model_validator(mode="after")
    def _something_is_masked(self) -> Self:
        if self.false_negatives is not None and not self.reads_candidates:
            raise ValueError(
                "false_negatives has no effect, because it changes InfoNCE only and infonce_weight "
                "is 0: set false_negatives=null, or infonce_weight above 0"
            )
        return self

    def with_infonce(
        self,
        loss_B: Float[Tensor, " B"],
        queries_BD: Float[Tensor, "B D"],
        candidates: Candidates,
        parameters: Parameters,
    ) -> Float[Tensor, " B"]:
        """Add the weighted InfoNCE loss to the distillation loss of each query."""
        if not self.infonce_weight:
            return loss_B
        return loss_B + self.infonce_weight * self.info_nce_of(queries_BD, candidates, parameters)


class Distilled(BesideInfoNCE):
    """Base class of losses that learn stored teacher scores of each query's positive and hard
    negatives, combined with InfoNCE.

    No teacher runs in the step. The scores are the cross-encoder's where mining rescored, else the
    teacher's cosines. A document without a score takes no part; a query whose positive or whose
    negatives all have none adds nothing but InfoNCE.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss needs, among them teacher scores."""
        return super().needs | {"teacher_scores"}

    @property
    def reads_in_batch(self) -> bool:
        """Whether the loss compares a row with other rows, as only InfoNCE and the spread-out
        regulariser do here.
        """
        return self.reads_candidates

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the float32 loss of each query, distillation and InfoNCE together."""
        teacher = candidates.teacher
        assert teacher is not None
        vectors = candidates.vectors
        own_BMD = vectors[teacher.places_BM] if vectors.ndim == 2 else vectors
        known_BM = ~teacher.scores_BM.isnan()
        # Without the positive, or with it alone, there is nothing to compare.
        known_BM = known_BM & known_BM[:, :1] & known_BM[:, 1:].any(dim=1, keepdim=True)
        scores_BM = teacher.scores_BM.masked_fill(~known_BM, 0.0)
        loss_B = self.of_scores(similarities(queries_BD, own_BMD), scores_BM, known_BM)
        return self.with_infonce(loss_B, queries_BD, candidates, parameters)

    def of_scores(
        self,
        cosines_BM: Float[Tensor, "B M"],
        scores_BM: Float[Tensor, "B M"],
        known_BM: Bool[Tensor, "B M"],
    ) -> Float[Tensor, " B"]:
        """Compute the distillation loss of each query, without InfoNCE; 0 for a query without
        teacher scores.

        Args:
            cosines_BM: of the query with its positive, then with its hard negatives.
            scores_BM: the teacher's; 0 where it has none.
            known_BM: which documents the teacher scored, none of a row or the positive and more.
        """
        raise TypeError(
            f"{type(self).__name__} does not define `of_scores`, which computes the loss"
        )

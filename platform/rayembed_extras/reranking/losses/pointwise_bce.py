"""Pointwise binary cross-entropy: each pair by itself is relevant or not.

L lists, M documents of a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed_extras.reranking.losses.contract import ListLoss, ScoredLists

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class PointwiseBCE(ListLoss):
    """Binary cross-entropy of each pair's score (monoBERT, arXiv 1901.04085, equation 1)."""

    kind: Literal["pointwise_bce"] = "pointwise_bce"
    positive_weight: PositiveFloat = 1.0
    """Factor of the relevant pairs, of which there are fewer."""

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the mean cross-entropy of each list's pairs; see `pointwise_bce`."""
        return pointwise_bce(
            lists.scores_LM, lists.relevant_LM, lists.there_LM, self.positive_weight
        )


def pointwise_bce(
    scores_LM: Float[Tensor, "L M"],
    relevant_LM: Bool[Tensor, "L M"],
    there_LM: Bool[Tensor, "L M"],
    positive_weight: float = 1.0,
) -> Float[Tensor, " L"]:
    """Mean over a list's documents of -w·y log σ(s) - (1 - y) log (1 - σ(s)); w weighs positives
    alone.
    """
    from torch.nn.functional import binary_cross_entropy_with_logits

    terms_LM = binary_cross_entropy_with_logits(
        scores_LM,
        relevant_LM.to(scores_LM.dtype),
        reduction="none",
        pos_weight=scores_LM.new_tensor(positive_weight),
    )
    return terms_LM.masked_fill(~there_LM, 0.0).sum(dim=1) / there_LM.sum(dim=1)

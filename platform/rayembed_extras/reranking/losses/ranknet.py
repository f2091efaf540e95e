"""RankNet: each document above each worse one of its list.

L lists, M documents of a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayembed.config.loss import Need
from rayembed_extras.reranking.losses.contract import ListLoss, ScoredLists

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class RankNet(ListLoss):
    """Logistic loss of all ordered pairs of a list (Burges and others, ICML 2005)."""

    kind: Literal["ranknet"] = "ranknet"
    order: Literal["labels", "teacher"] = "labels"
    """Which documents are better. `labels`: the positive than the negatives. `teacher`: those that
    mining scored higher (as RankGPT is distilled, arXiv 2304.09542, equation 2)."""

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss reads besides texts: a teacher's scores if they give the order."""
        return frozenset({"teacher_scores"} if self.order == "teacher" else ())

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the mean over each list's ordered pairs; see `ranknet`."""
        if self.order == "labels":
            labels_LM = lists.relevant_LM.to(lists.scores_LM.dtype)
            return ranknet(lists.scores_LM, labels_LM, lists.there_LM)
        return ranknet(lists.scores_LM, *lists.taught())


def ranknet(
    scores_LM: Float[Tensor, "L M"],
    labels_LM: Float[Tensor, "L M"],
    there_LM: Bool[Tensor, "L M"],
) -> Float[Tensor, " L"]:
    """Mean of log (1 + exp (s_j - s_i)) over the pairs of a list with label i above label j; 0 for
    a list without any.
    """
    from torch.nn.functional import softplus

    both_LMM = there_LM.unsqueeze(2) & there_LM.unsqueeze(1)
    above_LMM = (labels_LM.unsqueeze(2) > labels_LM.unsqueeze(1)) & both_LMM
    terms_LMM = softplus(scores_LM.unsqueeze(1) - scores_LM.unsqueeze(2))
    total_L = terms_LMM.masked_fill(~above_LMM, 0.0).sum(dim=(1, 2))
    return total_L / above_LMM.sum(dim=(1, 2)).clamp(min=1)

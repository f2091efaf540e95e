"""LambdaLoss: RankNet whose pairs weigh as much as swapping them would change NDCG.

L lists, M documents of a list.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from rayembed_extras.reranking.losses.contract import ListLoss, ScoredLists

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class LambdaLoss(ListLoss):
    """LambdaRank's bound of NDCG (Burges, MSR-TR-2010-82; LambdaLoss framework of Wang and others,
    CIKM 2018, section 4).
    """

    kind: Literal["lambda_loss"] = "lambda_loss"

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the weighted sum over each list's ordered pairs; see `lambda_loss`."""
        return lambda_loss(lists.scores_LM, lists.relevant_LM, lists.there_LM)


def lambda_loss(
    scores_LM: Float[Tensor, "L M"],
    relevant_LM: Bool[Tensor, "L M"],
    there_LM: Bool[Tensor, "L M"],
) -> Float[Tensor, " L"]:
    """Sum of |ΔNDCG_ij| log (1 + exp (s_j - s_i)) over the pairs with i relevant and j not.

    |ΔNDCG_ij| = |1 / log2 (1 + r_i) - 1 / log2 (1 + r_j)| / maxDCG with the ranks r of the present
    scores, from 1, and the gain 1 of a relevant document; it has no gradient.
    """
    import torch
    from torch.nn.functional import softplus

    found_LM = scores_LM.detach().masked_fill(~there_LM, -math.inf)
    order_LM = found_LM.argsort(dim=1, descending=True, stable=True)
    ranks_LM = order_LM.argsort(dim=1).to(scores_LM.dtype) + 1
    discount_LM = 1 / torch.log2(1 + ranks_LM)
    places_M = torch.arange(scores_LM.shape[1], device=scores_LM.device)
    ideal_LM = places_M < relevant_LM.sum(dim=1, keepdim=True)
    best_M = 1 / torch.log2(2 + places_M.to(scores_LM.dtype))
    best_L = (ideal_LM * best_M).sum(dim=1)
    change_LMM = (discount_LM.unsqueeze(2) - discount_LM.unsqueeze(1)).abs()
    wrong_LM = there_LM & ~relevant_LM
    pairs_LMM = relevant_LM.unsqueeze(2) & wrong_LM.unsqueeze(1)
    terms_LMM = change_LMM * softplus(scores_LM.unsqueeze(1) - scores_LM.unsqueeze(2))
    return terms_LMM.masked_fill(~pairs_LMM, 0.0).sum(dim=(1, 2)) / best_L

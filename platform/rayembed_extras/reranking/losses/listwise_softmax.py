"""Listwise softmax cross-entropy: the positive among the documents of its list.

L lists, M documents of a list.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed_extras.reranking.losses.contract import ListLoss, ScoredLists

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class ListwiseSoftmax(ListLoss):
    """Softmax cross-entropy of the positive among its hard negatives (localized contrastive
    estimation, arXiv 2101.08751).
    """

    kind: Literal["listwise_softmax"] = "listwise_softmax"
    temperature: PositiveFloat = 1.0
    """Temperature that divides the scores."""

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the cross-entropy of each list; see `listwise_softmax`."""
        return listwise_softmax(
            lists.scores_LM / self.temperature, lists.relevant_LM, lists.there_LM
        )


def listwise_softmax(
    scores_LM: Float[Tensor, "L M"],
    relevant_LM: Bool[Tensor, "L M"],
    there_LM: Bool[Tensor, "L M"],
) -> Float[Tensor, " L"]:
    """-log (exp s⁺ / Σ_d exp s_d) of each list, averaged over its positives."""
    log_LM = scores_LM.masked_fill(~there_LM, -math.inf).log_softmax(dim=1)
    return -log_LM.masked_fill(~relevant_LM, 0.0).sum(dim=1) / relevant_LM.sum(dim=1)

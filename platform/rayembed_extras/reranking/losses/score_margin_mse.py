"""Margin MSE: the margins of stored scores, learnt by a cross-encoder.

L lists, M documents of a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayembed.losses.margin_mse import margin_mse
from rayembed_extras.reranking.losses.contract import ScoredLists, TaughtListLoss

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ScoreMarginMSE(TaughtListLoss):
    """Squared difference of the model's and the teacher's margins (arXiv 2010.02666)."""

    kind: Literal["score_margin_mse"] = "score_margin_mse"
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    """Function of the model's scores. `sigmoid`: from 0 to 1, as stored scores of cross-encoders
    are. `identity`: for stored scores of another range."""

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the mean squared error over each list's negatives; see `margin_mse`."""
        scores_LM = lists.scores_LM
        if self.activation == "sigmoid":
            scores_LM = scores_LM.sigmoid()
        return margin_mse(scores_LM, *lists.taught())

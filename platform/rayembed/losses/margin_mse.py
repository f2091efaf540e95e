"""MarginMSE: train the model's margin between positive and hard negative to match the
teacher's.

B queries, M own documents of a query: its positive, then its hard negatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed.losses.distilled import Distilled

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class MarginMSE(Distilled):
    """Squared difference of the model's and the teacher's margins (arXiv 2010.02666)."""

    kind: Literal["margin_mse"] = "margin_mse"
    scale: PositiveFloat = 1.0
    """Factor of the model's cosines. 1 for a teacher that gives cosines; cosines never reach the
    margins of a cross-encoder's logits, for which it is about their range, 10 to 20."""

    def of_scores(
        self,
        cosines_BM: Float[Tensor, "B M"],
        scores_BM: Float[Tensor, "B M"],
        known_BM: Bool[Tensor, "B M"],
    ) -> Float[Tensor, " B"]:
        """Compute the squared error of each query; see `margin_mse`."""
        return margin_mse(self.scale * cosines_BM, scores_BM, known_BM)


def margin_mse(
    scores_BM: Float[Tensor, "B M"],
    teacher_BM: Float[Tensor, "B M"],
    known_BM: Bool[Tensor, "B M"],
) -> Float[Tensor, " B"]:
    """Mean of ((s⁺ - s⁻) - (t⁺ - t⁻))² over each row's negatives with a teacher score; 0 for a row
    without any.
    """
    margins_BK = scores_BM[:, :1] - scores_BM[:, 1:]
    wanted_BK = teacher_BM[:, :1] - teacher_BM[:, 1:]
    squared_BK = (margins_BK - wanted_BK).square().masked_fill(~known_BM[:, 1:], 0.0)
    return squared_BK.sum(dim=1) / known_BM[:, 1:].sum(dim=1).clamp(min=1)

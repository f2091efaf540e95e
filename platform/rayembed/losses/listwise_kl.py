"""Listwise distillation: train the model's distribution over a query's documents to match the
teacher's.

B queries, M own documents of a query: its positive, then its hard negatives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed.losses.distilled import Distilled

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class ListwiseKL(Distilled):
    """Kullback–Leibler divergence from the teacher's softmax to the model's (arXiv 2110.07367)."""

    kind: Literal["listwise_kl"] = "listwise_kl"
    temperature: PositiveFloat = 0.05
    """Temperature that divides the model's cosines."""
    teacher_temperature: PositiveFloat = 0.3
    """Temperature that divides the teacher's scores, after `scaling`."""
    scaling: Literal["min_max", "none"] = "min_max"
    """`min_max` maps the scores of each query's documents to 0 to 1, so that one temperature serves
    cosines, probabilities and logits; `none` takes them as they are."""

    def of_scores(
        self,
        cosines_BM: Float[Tensor, "B M"],
        scores_BM: Float[Tensor, "B M"],
        known_BM: Bool[Tensor, "B M"],
    ) -> Float[Tensor, " B"]:
        """Compute the divergence of each query; see `listwise_kl`."""
        if self.scaling == "min_max":
            scores_BM = _min_max(scores_BM, known_BM)
        return listwise_kl(
            cosines_BM / self.temperature, scores_BM / self.teacher_temperature, known_BM
        )


def listwise_kl(
    logits_BM: Float[Tensor, "B M"],
    teacher_BM: Float[Tensor, "B M"],
    known_BM: Bool[Tensor, "B M"],
) -> Float[Tensor, " B"]:
    """KL divergence of each row: Σ_d p(d) (log p(d) - log q(d)) with p = softmax(teacher), q =
    softmax(logits).

    Both distributions are over the known documents; a row without any gives 0.

    Args:
        logits_BM: cosines of the model over its temperature, float32.
        teacher_BM: scores of the teacher over its own, float32.
    """
    # A row that knows nothing is taken whole and its divergence left out: no NaN in its gradient.
    none_B1 = ~known_BM.any(dim=1, keepdim=True)
    left_out = ~known_BM & ~none_B1
    log_q_BM = logits_BM.masked_fill(left_out, -math.inf).log_softmax(dim=1)
    log_p_BM = teacher_BM.masked_fill(left_out, -math.inf).log_softmax(dim=1)
    terms_BM = log_p_BM.exp() * (log_p_BM - log_q_BM)
    return terms_BM.masked_fill(~known_BM, 0.0).sum(dim=1)


def _min_max(
    scores_BM: Float[Tensor, "B M"], known_BM: Bool[Tensor, "B M"]
) -> Float[Tensor, "B M"]:
    """Scale the known scores of each row to the range 0 to 1; equal scores become 0."""
    low_B1 = scores_BM.masked_fill(~known_BM, math.inf).amin(dim=1, keepdim=True)
    high_B1 = scores_BM.masked_fill(~known_BM, -math.inf).amax(dim=1, keepdim=True)
    width_B1 = (high_B1 - low_B1).masked_fill(high_B1 <= low_B1, 1.0)
    return ((scores_BM - low_B1) / width_B1).masked_fill(~known_BM, 0.0)

"""Listwise distillation: the teacher's distribution over a list, learnt by a cross-encoder.

L lists, M documents of a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed.losses.listwise_kl import listwise_kl
from rayembed_extras.reranking.losses.contract import ScoredLists, TaughtListLoss

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ScoreKL(TaughtListLoss):
    """Kullback–Leibler divergence from the teacher's softmax over a list to the model's (arXiv
    2110.07367).
    """

    kind: Literal["score_kl"] = "score_kl"
    temperature: PositiveFloat = 1.0
    """Temperature that divides the model's scores."""
    teacher_temperature: PositiveFloat = 0.1
    """Temperature that divides the stored scores, which of cross-encoders are from 0 to 1."""

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the divergence of each list; see `listwise_kl`."""
        teacher_LM, known_LM = lists.taught()
        return listwise_kl(
            lists.scores_LM / self.temperature, teacher_LM / self.teacher_temperature, known_LM
        )

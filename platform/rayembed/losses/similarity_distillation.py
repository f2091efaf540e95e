"""Relational distillation: train the model's cosines of queries and documents to match its
teachers'.

B queries, N candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed.config.loss import Need
from rayembed.losses.contract import Candidates, similarities
from rayembed.losses.distilled import BesideInfoNCE
from rayembed.losses.listwise_kl import listwise_kl

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rayembed.losses.contract import Parameters


class SimilarityDistillation(BesideInfoNCE):
    """Relational distillation (arXiv 1904.05068) of each query's similarities to the batch's
    documents, combined with InfoNCE.

    Averaged over the teachers, whose widths may be any. No teacher runs in the step. Documents that
    are known positives or that are left out as false negatives count here, each text once.
    """

    kind: Literal["similarity_distillation"] = "similarity_distillation"
    form: Literal["kl", "mse"] = "kl"
    """`kl`: divergence of a query's distribution over the documents from the teacher's. `mse`:
    squared difference of the cosines, mean over the documents."""
    temperature: PositiveFloat = 0.05
    """Temperature that divides the model's cosines, with `kl`."""
    teacher_temperature: PositiveFloat = 0.05
    """Temperature that divides the teachers' cosines, with `kl`."""

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss needs, among them the teachers' vectors."""
        return super().needs | {"teacher_vectors"}

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the float32 loss of each query, distillation and InfoNCE together."""
        import torch

        teachers = candidates.vectors_of_teachers
        assert teachers is not None
        cosines_BN = similarities(queries_BD, candidates.vectors)
        losses = [
            self._of(cosines_BN, wanted_BN.float(), teachers.seen_BN)
            for wanted_BN in teachers.cosines
        ]
        loss_B = torch.stack(losses).mean(dim=0)
        return self.with_infonce(loss_B, queries_BD, candidates, parameters)

    def _of(
        self,
        cosines_BN: Float[Tensor, "B N"],
        wanted_BN: Float[Tensor, "B N"],
        seen_BN: Bool[Tensor, "B N"],
    ) -> Float[Tensor, " B"]:
        if self.form == "kl":
            teacher_BN = wanted_BN / self.teacher_temperature
            return listwise_kl(cosines_BN / self.temperature, teacher_BN, seen_BN)
        squared_BN = (cosines_BN - wanted_BN).square().masked_fill(~seen_BN, 0.0)
        return squared_BN.sum(dim=1) / seen_BN.sum(dim=1)

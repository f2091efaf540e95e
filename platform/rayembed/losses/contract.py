"""Base classes of losses: what a step hands to a loss, and what comes back.

Importing this module or that of a loss loads no torch, for settings are read where there is none.

B queries of this worker, N candidates, D embedding width, G pairs of all workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from rayembed.config.loss import LossConfig, Need
from rayembed.config.settings import Settings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Parameters = Mapping[str, Tensor]
    """Values of a loss's parameters by name, float32."""


class FalseNegatives(Settings):
    """Hard negatives that a teacher scores above the positive are no candidates of the query.

    The scores are those of mining, by the cross-encoder where it rescored. A negative without a
    score stays.
    """

    margin: float = 0.0
    """A hard negative is left out if its score exceeds the positive's by more than this. Below 0
    also those are left out that come near the positive (NV-Retriever, arXiv 2407.15831)."""


@dataclass(frozen=True)
class TeacherScores:
    """Scores by a teacher of each query's own documents: its positive, then its M - 1 negatives."""

    places_BM: Int[Tensor, "B M"]
    """Places of the documents among the candidates. What stands at the place of a missing negative
    is any document."""
    scores_BM: Float[Tensor, "B M"]
    """All of a row by the same teacher; NaN where there is none, as of a missing negative."""


@dataclass(frozen=True)
class Candidates:
    """Documents among which each query has its positive."""

    vectors: Float[Tensor, "N D"] | Float[Tensor, "B N D"]
    """Unit length: the same ones for all queries, or each query's own."""
    positive_B: Int[Tensor, " B"]
    """Place of each query's positive among its candidates."""
    mask_BN: Bool[Tensor, "B N"]
    """Which candidates count for a query; its positive always does."""
    teacher: TeacherScores | None = None
    """There where the loss needs `teacher_scores`. A document that the mask leaves out has its
    score nevertheless: a false negative is what a teacher knows best."""


class Contrastive(LossConfig):
    """A loss of each query over its candidates, one of which is its positive.

    The step averages over the rows of all workers.
    """

    row_blocks: ClassVar[bool] = True

    # Left out while there is none, so that fingerprints of runs from before there was one stay.
    false_negatives: FalseNegatives | None = Field(default=None, exclude_if=lambda it: it is None)
    """Which hard negatives are left out by a teacher's scores; None: none are."""

    @property
    def needs(self) -> frozenset[Need]:
        """Teacher scores, where false negatives are told by them."""
        return frozenset() if self.false_negatives is None else frozenset({"teacher_scores"})

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Loss of each query, float32.

        Args:
            queries_BD: unit length.
            parameters: current values of `initial_parameters`.
        """
        raise TypeError(f"{type(self).__name__} computes nothing")


class Pairwise(LossConfig):
    """A loss that compares graded pairs of query and document with each other."""

    takes_candidates: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        """The similarity of each pair."""
        return frozenset({"similarity"})

    def of_pairs(
        self,
        queries_GD: Float[Tensor, "G D"],
        documents_GD: Float[Tensor, "G D"],
        similarity_G: Float[Tensor, " G"],
        parameters: Parameters,
    ) -> Float[Tensor, ""]:
        """Loss of all pairs of the global batch, float32.

        Args:
            queries_GD: unit length.
            documents_GD: unit length.
            similarity_G: graded similarity of each pair.
            parameters: current values of `initial_parameters`.
        """
        raise TypeError(f"{type(self).__name__} computes nothing")


def similarities(
    queries_BD: Float[Tensor, "B D"],
    candidates: Float[Tensor, "N D"] | Float[Tensor, "B N D"],
) -> Float[Tensor, "B N"]:
    """Products of queries and candidates in float32, cosines for unit vectors.

    Candidates of each query's own cost B·N products instead of those of all documents of a batch.
    """
    if candidates.ndim == 2:
        return queries_BD.float() @ candidates.float().T
    import torch

    return torch.einsum("bd,bnd->bn", queries_BD.float(), candidates.float())


def scalar(value: float) -> Any:
    """A number as a float32 tensor, the initial value of a loss's parameter."""
    import torch

    return torch.tensor(value, dtype=torch.float32)

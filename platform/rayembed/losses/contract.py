"""Base classes of losses: the data that a training step passes to a loss, and the values that it
returns.

Importing this module or that of a loss loads no torch, for settings are read where there is none.

B queries of this worker, N candidates, D embedding width, G pairs of all workers, M = 1 + K own
documents of a query, T width of a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rayembed.config.loss import LossConfig, Need
from rayembed.config.settings import Settings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Parameters = Mapping[str, Tensor]
    """Values of a loss's parameters by name, float32."""


Direction = Literal["document_to_query", "query_to_query", "document_to_document"]
"""Pairs of texts of different rows that a loss can push apart, besides query and document."""


class FalseNegatives(Settings):
    """Rule that excludes candidate documents that score above the positive."""

    by: Literal["mining", "teachers", "own"] = "mining"
    """Source of the scores. `mining`: those that mining stored of a query's own hard negatives, by
    the cross-encoder where it rescored; a document without a score stays. `teachers`: cosines of
    the stage's `teachers`, of all candidates that the batch has for a query, other rows' positives
    and negatives among them (GISTEmbed, arXiv 2402.16829); of several teachers one is enough.
    `own`: cosines of all candidates by the trained model itself, at its full width in float32
    (Qwen3 Embedding, arXiv 2506.05176); no data is needed."""
    margin: float = 0.0
    """A document is left out if its score exceeds the positive's by more than this. Below 0 also
    those are left out that come near the positive (-0.05 in NV-Retriever, arXiv 2407.15831); with
    0.1 only those far above it (Qwen3 Embedding, arXiv 2506.05176). `own` needs one: with 0 the
    model would learn nothing of a negative that it ranks too high."""

    @model_validator(mode="after")
    def _own_has_a_margin(self) -> FalseNegatives:
        if self.by == "own" and "margin" not in self.model_fields_set:
            raise ValueError(
                "loss.false_negatives.by=own needs loss.false_negatives.margin: without it every "
                "negative that the model ranks above the positive is left out; set it to 0.1, for "
                "instance"
            )
        return self


@dataclass(frozen=True)
class TeacherScores:
    """Teacher scores of each query's own documents: its positive, then its M - 1 negatives."""

    places_BM: Int[Tensor, "B M"]
    """Indices of the documents among the candidates. What stands at the place of a missing negative
    is any document."""
    scores_BM: Float[Tensor, "B M"]
    """Scores of a row, all by the same teacher; NaN where there is none, as of a missing negative.
    """


@dataclass(frozen=True)
class TeacherVectors:
    """Unit vectors of queries and documents from each of the stage's teachers, stored as
    float16.
    """

    queries: tuple[Float[Tensor, "B T"], ...]
    documents: tuple[Float[Tensor, "N T"] | Float[Tensor, "B N T"], ...]
    """Vectors of the candidates, shared by all queries or separate for each."""
    places_BM: Int[Tensor, "B M"]
    """Indices of each query's positive and its negatives among the candidates. What stands at the
    place of a missing negative is any document."""
    own_BM: Bool[Tensor, "B M"]
    """Mask of the documents that exist."""
    seen_BN: Bool[Tensor, "B N"]
    """Mask of the documents that a query is compared with, each text once; includes known positives
    and false negatives, whose scores come from the teacher."""

    @cached_property
    def cosines(self) -> tuple[Float[Tensor, "B N"], ...]:
        """(B, N) float64 cosines of each teacher; see `exact_cosines`."""
        pairs = zip(self.queries, self.documents, strict=True)
        return tuple(exact_cosines(queries, documents) for queries, documents in pairs)


@dataclass(frozen=True)
class FurtherNegatives:
    """Negatives of one direction: a text of each row, and texts of other rows."""

    anchors_BD: Float[Tensor, "B D"]
    """The row's own text, its query or its positive; unit length."""
    others_ND: Float[Tensor, "N D"]
    """Queries or documents of all workers; unit length."""
    mask_BN: Bool[Tensor, "B N"]
    """Mask of the texts that count for a row; none may."""


@dataclass(frozen=True)
class FurtherPositives:
    """Positives of each query beyond the one among its candidates."""

    vectors_BPD: Float[Tensor, "B P D"]
    """Unit length; any vector in the place of a missing one."""
    mask_BP: Bool[Tensor, "B P"]
    """Mask of the positives that exist."""


@dataclass(frozen=True)
class Candidates:
    """Documents with which each query is compared, including its positive."""

    vectors: Float[Tensor, "N D"] | Float[Tensor, "B N D"]
    """Candidate vectors of unit length: the same ones for all queries, or each query's own."""
    positive_B: Int[Tensor, " B"]
    """Index of each query's positive among its candidates."""
    mask_BN: Bool[Tensor, "B N"]
    """Mask of the candidates that count for a query; its positive always does."""
    teacher: TeacherScores | None = None
    """Teacher scores, if the loss needs `teacher_scores`. They include documents that the mask
    excludes, since false negatives teach too."""
    vectors_of_teachers: TeacherVectors | None = None
    """Teacher vectors, if the loss needs `teacher_vectors`."""
    hard_BN: Bool[Tensor, "B N"] | None = None
    """Mask of the texts that are hard negatives of the query itself, if `marks_hard_negatives`."""
    further: tuple[FurtherNegatives, ...] = ()
    """Negatives of the loss's `further_directions`, in their order."""
    further_positives: FurtherPositives | None = None
    """Further positives, if the stage's `batch.num_positives` is above 1 and a row has some."""


class Contrastive(LossConfig):
    """Base class of losses that compare a query's positive with its other candidates.

    The step averages over the rows of all workers.
    """

    row_blocks: ClassVar[bool] = True

    false_negatives: FalseNegatives | None = None
    """Rule that excludes documents by scores; None excludes none."""
    spread_out: float = Field(default=0.0, ge=0)
    """Weight of the spread-out regulariser at each width (`losses.spread_out`); 0: none."""

    @property
    def needs(self) -> frozenset[Need]:
        """Teacher data that the loss reads; here only scores or vectors that detect false
        negatives, if the loss does so.
        """
        if self.false_negatives is None or self.false_negatives.by == "own":
            return frozenset()
        by_mining = self.false_negatives.by == "mining"
        return frozenset({"teacher_scores" if by_mining else "teacher_vectors"})

    @property
    def further_directions(self) -> tuple[Direction, ...]:
        """Directions besides query to document whose negatives the loss reads."""
        return ()

    @property
    def marks_hard_negatives(self) -> bool:
        """Whether the loss reads `Candidates.hard_BN`."""
        return False

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the float32 loss of each query.

        Args:
            queries_BD: unit length.
            parameters: current values of `initial_parameters`.
        """
        raise TypeError(f"{type(self).__name__} does not define `of_rows`, which computes the loss")


class Pairwise(LossConfig):
    """Base class of losses that compare graded query-document pairs with each other."""

    takes_candidates: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss needs: the graded similarity of each pair."""
        return frozenset({"similarity"})

    def of_pairs(
        self,
        queries_GD: Float[Tensor, "G D"],
        documents_GD: Float[Tensor, "G D"],
        similarity_G: Float[Tensor, " G"],
        parameters: Parameters,
    ) -> Float[Tensor, ""]:
        """Compute the float32 loss over all pairs of the global batch.

        Args:
            queries_GD: unit length.
            documents_GD: unit length.
            similarity_G: graded similarity of each pair.
            parameters: current values of `initial_parameters`.
        """
        raise TypeError(
            f"{type(self).__name__} does not define `of_pairs`, which computes the loss"
        )


def similarities(
    queries_BD: Float[Tensor, "B D"],
    candidates: Float[Tensor, "N D"] | Float[Tensor, "B N D"],
) -> Float[Tensor, "B N"]:
    """Inner products of queries and candidates in float32, which are cosines for unit
    vectors.

    Candidates of each query's own cost B·N products instead of those of all documents of a batch.
    """
    if candidates.ndim == 2:
        return queries_BD.float() @ candidates.float().T
    import torch

    return torch.einsum("bd,bnd->bn", queries_BD.float(), candidates.float())


_COLUMNS = 1 << 13
"""Number of documents whose vectors are converted to float64 at a time."""


def exact_cosines(
    queries_BT: Float[Tensor, "B T"],
    documents: Float[Tensor, "N T"] | Float[Tensor, "B N T"],
) -> Float[Tensor, "B N"]:
    """Cosines of float16 unit vectors in float64, which are exact and so do not depend on workers,
    blocks or device.

    A float16 number is a multiple of 2⁻²⁴, a product of two of 2⁻⁴⁸, and no sum of a unit vector's
    products exceeds 2: 49 of the 53 bits, in any order.
    """
    import torch

    queries_BT = queries_BT.double()
    if documents.ndim == 3:
        return torch.einsum("bt,bnt->bn", queries_BT, documents.double())
    blocks = torch.split(documents, _COLUMNS)
    return torch.cat([queries_BT @ some.double().T for some in blocks], dim=1)


def scalar(value: float) -> Any:
    """Make a float32 scalar tensor, the initial value of a loss's trained parameter."""
    import torch

    return torch.tensor(value, dtype=torch.float32)

"""Distillation of vectors: train the model's vectors to match its teachers' vectors.

B queries, M = 1 + K own documents of a query, D width of the model, T of a teacher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from rayembed.config.loss import Need
from rayembed.errors import ConfigError
from rayembed.losses.contract import Candidates
from rayembed.losses.distilled import BesideInfoNCE
from rayembed.losses.infonce import info_nce

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rayembed.config.loss import Widths
    from rayembed.losses.contract import Parameters

_NAME = "projection"


class VectorDistillation(BesideInfoNCE):
    """Distance between the model's and the teachers' vectors of a row's texts, combined with
    InfoNCE.

    A row's loss is half that of its query and half the mean of its positive's and its negatives',
    averaged over the teachers. No teacher runs in the step. NV-Embed's own distillation (arXiv
    2405.17428, appendix A.2) compares hidden states, for which one must: the stage's
    `hidden_states`.
    """

    kind: Literal["vector_distillation"] = "vector_distillation"
    form: Literal["cosine", "mse"] = "cosine"
    """`cosine`: one minus the cosine. `mse`: squared difference, mean over the components; of unit
    vectors of width T it is 2 / T times the former."""
    projection: bool | None = None
    """Whether to train a matrix, outside the trained model, that maps the model's vectors to each
    teacher's; None: where a teacher's width is not the model's. It begins as the identity, with
    zeros for a teacher's further components or without those that it lacks. False: the vectors
    themselves, of a wider model the first T components, which `dimensions` must name."""

    teacher_documents: float = Field(default=0.0, ge=0, le=1, exclude_if=lambda it: it == 0)
    """Share of InfoNCE that compares queries with the teachers' documents, as an index of them
    does, and not with the model's own (after backward-compatible training, arXiv 2003.11942)."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The projection, and the logarithm of the temperature if it is trained."""
        return (_NAME, *super().parameter_names)

    @property
    def needs(self) -> frozenset[Need]:
        """Data that the loss needs, among them the teachers' vectors."""
        return super().needs | {"teacher_vectors"}

    def initial_parameters(self, widths: Widths) -> dict[str, Any]:
        """Return the initial projection matrices (T, D) of all teachers in one tensor, unless
        there is no projection, and a trained temperature.

        Raises:
            ConfigError: there is to be no projection, and the model learns no vectors of a
                teacher's width.
        """
        differ = any(width != widths.student for width in widths.teachers)
        learnt = {widths.student, *self.dimensions}
        if self.projection is False and not learnt.issuperset(widths.teachers):
            raise ConfigError(
                f"loss.projection is false, but the model's vectors have {widths.student} "
                "dimensions and those of the stage's teachers have "
                f"{', '.join(map(str, widths.teachers))}; set loss.projection=null, use a "
                "teacher with as many dimensions as the model, or learn the teacher's smaller "
                "width too (loss.dimensions)"
            )
        if not (differ if self.projection is None else self.projection):
            return super().initial_parameters(widths)
        import torch

        matrices = [torch.eye(width, widths.student) for width in widths.teachers]
        return {_NAME: torch.cat(matrices), **super().initial_parameters(widths)}

    @model_validator(mode="after")
    def _own_documents_alone(self) -> Self:
        names = ("directions", "hardness", "focal")
        if self.teacher_documents and (given := [n for n in names if getattr(self, n)]):
            raise ValueError(
                f"{', '.join(given)} with teacher_documents={self.teacher_documents:g}: these "
                "change InfoNCE over the model's own documents only; remove them, or set "
                "teacher_documents=0"
            )
        return self

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the float32 loss of each query, distillation and InfoNCE together."""
        import torch

        teachers = candidates.vectors_of_teachers
        assert teachers is not None
        width = queries_BD.shape[1]
        own_BMD = _own(candidates.vectors, teachers.places_BM)
        own_BM = teachers.own_BM.float()
        share_BM = own_BM / own_BM.sum(dim=1, keepdim=True)
        heights = [wanted.shape[1] for wanted in teachers.queries]
        projection = parameters.get(_NAME)
        matrices = [None] * len(heights) if projection is None else torch.split(projection, heights)
        losses, across = [], []
        for matrix, queries_BT, documents in zip(
            matrices, teachers.queries, teachers.documents, strict=True
        ):
            # Of vectors that are cut the leading columns map the components that are left.
            part = None if matrix is None else matrix[:, :width]
            of_query_B = self._of(queries_BD, queries_BT, part)
            of_own_BM = self._of(own_BMD, _own(documents, teachers.places_BM), part)
            losses.append((of_query_B + (of_own_BM * share_BM).sum(dim=1)) / 2)
            if self.teacher_documents and self.infonce_weight:
                temperature = self.temperature_of(parameters)
                across.append(self._across(queries_BD, documents, part, candidates, temperature))
        loss_B = torch.stack(losses).mean(dim=0)
        if not across:
            return self.with_infonce(loss_B, queries_BD, candidates, parameters)
        share = self.infonce_weight * self.teacher_documents
        if self.teacher_documents < 1:
            none_B = torch.zeros_like(loss_B)
            own_B = self.with_infonce(none_B, queries_BD, candidates, parameters)
            loss_B = loss_B + (1 - self.teacher_documents) * own_B
        return loss_B + share * torch.stack(across).mean(dim=0)

    def _across(
        self,
        queries_BD: Float[Tensor, "B D"],
        documents: Float[Tensor, "N T"] | Float[Tensor, "B N T"],
        matrix: Float[Tensor, "T D"] | None,
        candidates: Candidates,
        temperature: float | Float[Tensor, ""],
    ) -> Float[Tensor, " B"]:
        """Compute InfoNCE of the queries, projected by `matrix`, over a teacher's documents."""
        from torch.nn import functional

        queries, documents = _alike(queries_BD.float(), documents.float(), matrix)
        return info_nce(
            functional.normalize(queries, dim=-1),
            documents,
            candidates.positive_B,
            candidates.mask_BN,
            temperature,
        )

    def _of(
        self,
        vectors: Float[Tensor, "... D"],
        wanted: Float[Tensor, "... T"],
        matrix: Float[Tensor, "T D"] | None,
    ) -> Tensor:
        """Compute the distance of each vector, projected by `matrix` unless that is None, to the
        teacher's vector.
        """
        from torch.nn import functional

        vectors, wanted = _alike(vectors.float(), wanted.float(), matrix)
        if self.form == "cosine":
            return 1 - functional.cosine_similarity(vectors, wanted, dim=-1)
        return (vectors - wanted).square().mean(dim=-1)


def _alike(vectors: Tensor, wanted: Tensor, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bring vectors and a teacher's to one width, by `matrix` or by their first components."""
    from rayembed.losses.straight_through import cut

    if matrix is not None:
        return vectors @ matrix.float().T, wanted
    width = min(vectors.shape[-1], wanted.shape[-1])
    return cut(vectors, width), cut(wanted, width)


def _own(
    documents: Float[Tensor, "N D"] | Float[Tensor, "B N D"], places_BM: Any
) -> Float[Tensor, "B M D"]:
    """(B, M, D) vectors of each query's positive and hard negatives."""
    return documents[places_BM] if documents.ndim == 2 else documents

"""Judge that uses a cross-encoder: a negative that it scores above the positive is a false
negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rayembed.config.mining import CrossEncoder
from rayembed_extras.synthesis.repair.settings import Judge

if TYPE_CHECKING:
    from rayembed.data.engine.parts import Part
    from rayembed.data.records import Record
    from rayembed_extras.synthesis.repair.verdicts import JudgeVerdict, JudgeWork

ABOVE_POSITIVE = "scores above the positive"
ABOVE_MINIMUM = "scores above min_score"


class CrossEncoderJudge(CrossEncoder, Judge):
    """Settings of a reranker as judge, which scores query and document together, from 0 to 1."""

    needs: ClassVar[Literal["cpu", "gpu or machine"]] = "gpu or machine"

    kind: Literal["cross_encoder"] = "cross_encoder"
    margin: float | None = Field(default=0.0, ge=-1.0, le=1.0)
    """A false negative scores above the row's lowest-scoring positive by more than this; None:
    positives are not compared."""
    min_score: float | None = Field(default=None, ge=0.0, le=1.0)
    """A false negative scores at least this, too; None: no minimum."""

    @model_validator(mode="after")
    def _has_a_limit(self) -> CrossEncoderJudge:
        if self.margin is None and self.min_score is None:
            raise ValueError(
                "margin and min_score are both null, so every negative would count as false; "
                "set one of them"
            )
        return self

    @property
    def summary(self) -> str:
        """Name of the reranker, for tables."""
        return self.model

    @property
    def models(self) -> Mapping[str, str]:
        """Setting → reference of the reranker."""
        return {"model": self.model}

    def check(self, setting: str) -> None:
        """Check that the model is a reranker with a trained head."""
        from rayembed.assets.resolver import resolve_model
        from rayembed.data.mining.rescoring import check_cross_encoder
        from rayembed.errors import ArtifactError, AssetError

        try:
            check_cross_encoder(resolve_model(self.model), self.model)
        except (AssetError, ArtifactError) as error:
            raise type(error)(f"{setting}.model cannot be used: {error}") from None

    def inputs(self, fingerprint: Callable[[str], str]) -> dict[str, Any]:
        """Everything that decides the verdicts: limits of scores, and the fingerprint of the
        reranker's weights.
        """
        settings = self.model_dump(mode="json", exclude={"model"})
        return {**settings, "model": fingerprint(self.model)}

    def ready(self, work: JudgeWork) -> ScoreNegatives:
        """Choose the number type; each worker process loads the model later, by itself."""
        weights = work.context.teacher_loader.fingerprint(self.model)
        return ScoreNegatives(work.writer.settled(work.context, self), weights)


@dataclass(frozen=True)
class ScoreNegatives:
    """Judges records by the reranker's scores of query and document."""

    judge: CrossEncoderJudge
    weights: str
    """Fingerprint of the model's weights."""

    def __call__(self, part: Part, records: Sequence[Record], device: str) -> list[JudgeVerdict]:
        """Judge records; each pair of query and document is scored once."""
        from rayembed.data.mining.rescoring import load_cross_encoder
        from rayembed_extras.synthesis.repair.verdicts import NO_NEGATIVE, JudgeVerdict

        score = load_cross_encoder(self.judge, self.weights, device)
        pairs = sorted(
            {
                (record.query, text)
                for record in records
                if record.negatives
                for text in (*record.positives, *(one.text for one in record.negatives))
            }
        )
        scores = dict(zip(pairs, score(pairs).tolist(), strict=True))
        return [
            self._verdict(record, scores) if record.negatives else JudgeVerdict(problem=NO_NEGATIVE)
            for record in records
        ]

    def _verdict(self, record: Record, scores: Mapping[tuple[str, str], float]) -> JudgeVerdict:
        from rayembed_extras.synthesis.repair.verdicts import JudgeVerdict

        judge = self.judge
        lowest = min(scores[record.query, text] for text in record.positives)
        of_negatives = tuple(scores[record.query, one.text] for one in record.negatives)
        return JudgeVerdict(
            frozenset(
                place
                for place, score in enumerate(of_negatives)
                if (judge.margin is None or score > lowest + judge.margin)
                and (judge.min_score is None or score >= judge.min_score)
            ),
            ABOVE_MINIMUM if judge.margin is None else ABOVE_POSITIVE,
            of_negatives,
            lowest,
        )

"""What a judge is given and what it says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayembed.data.engine.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.engine.parts import Part
from rayembed.data.records import Record


@dataclass(frozen=True)
class JudgeWork:
    """What a judge has to judge, and with whom."""

    context: PipelineContext
    writer: ArtifactWriter
    """Writes the folder that the judge's verdicts decide."""
    dataset: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class JudgeVerdict:
    """What a judge says of a row's hard negatives."""

    false: frozenset[int] = frozenset()
    """Places of the negatives that answer the query."""
    reason: str = ""
    """Why these are false negatives, for counts."""
    scores: tuple[float, ...] = ()
    """Score of each negative, if the judge has scores."""
    positive_score: float | None = None
    """Score that negatives were compared with."""
    problem: str = ""
    """Why the row was not judged; it stays as it was."""
    answer: str = ""
    """Beginning of the answer that could not be used."""


NO_NEGATIVE = "no negative"

Decide = Callable[[Part, Sequence[Record], str], list[JudgeVerdict]]
"""Verdicts on a part's records, in their order, by a model on the device that is named."""

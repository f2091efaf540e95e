"""Types of a judge's input and output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayembed.data.engine.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.engine.parts import Part
from rayembed.data.records import Record


@dataclass(frozen=True)
class JudgeWork:
    """Rows to judge, and the resources that judging may use."""

    context: PipelineContext
    writer: ArtifactWriter
    """Writer of the folder that depends on the verdicts."""
    dataset: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class JudgeVerdict:
    """Verdict of a judge on a row's hard negatives."""

    false: frozenset[int] = frozenset()
    """Indices of the negatives that answer the query."""
    reason: str = ""
    """Reason why these are false negatives, for counts."""
    scores: tuple[float, ...] = ()
    """Score of each negative, if the judge has scores."""
    positive_score: float | None = None
    """Score that the negatives were compared with."""
    problem: str = ""
    """Reason why the row was not judged and stays unchanged."""
    answer: str = ""
    """Beginning of the unusable answer."""


NO_NEGATIVE = "no negative"

Decide = Callable[[Part, Sequence[Record], str], list[JudgeVerdict]]
"""Decides on a part's records in order, by a model on the given device."""

"""Sources of sentence pairs with similarity scores: similar pairs as positives, or all pairs with
their grade.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from rayembed.config.sources import Column
from rayembed.data.sources.cells import RowError, number_in, text_in
from rayembed.data.sources.file_rows import FileRows, record_of

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.records import Record
    from rayembed.data.sources.rows import Row

NOT_SIMILAR = "not similar"


class STSSource(FileRows):
    """Two sentences and their similarity in each row; similar ones give a record in each
    direction.
    """

    columns_read: ClassVar = ("first", "second", "score")
    can_hold_out: ClassVar = True
    tolerated: ClassVar = frozenset({NOT_SIMILAR})

    kind: Literal["sts"] = "sts"
    first: Column = "sentence1"
    second: Column = "sentence2"
    score: Column = "score"
    min_score: float = 4.0
    """Minimum similarity; pairs below are rejected as `not similar`, which does not count against
    `max_rejected_share` (NV-Embed, section 4.2: at least 4 of 5)."""

    def records(self, dataset: DatasetConfig, row: Row) -> list[Record]:
        """Make two records, one in each direction, from a row with sufficiently similar
        sentences.

        Raises:
            RowError: `NOT_SIMILAR`, or a cell that is empty or of another type.
        """
        first, second, language, score = _read(self, row)
        if score < self.min_score:
            raise RowError(NOT_SIMILAR)
        return [
            record_of(dataset, query, [positive], origin=[row.origin], language=language)
            for query, positive in ((first, second), (second, first))
        ]


class GradedSource(FileRows):
    """Two sentences and their similarity in each row; every pair gives one record that keeps its
    similarity.

    For losses over graded pairs, such as CoSENT. The pair need not be similar, so that the records
    serve no other loss, and no mining.
    """

    columns_read: ClassVar = ("first", "second", "score")
    can_hold_out: ClassVar = True
    is_graded: ClassVar = True

    kind: Literal["graded"] = "graded"
    first: Column = "sentence1"
    second: Column = "sentence2"
    score: Column = "score"
    lowest: float = 0.0
    """Score of a pair without any common meaning; the similarity is 0 there."""
    highest: float = 5.0
    """Score of a pair with the same meaning; the similarity is 1 there."""

    @model_validator(mode="after")
    def _is_a_scale(self) -> GradedSource:
        if self.lowest >= self.highest:
            raise ValueError(
                f"lowest {self.lowest:g} must be below highest {self.highest:g}; these are the "
                "scores of the least and of the most similar pairs"
            )
        return self

    def records(self, dataset: DatasetConfig, row: Row) -> list[Record]:
        """Make the record of a row, with its similarity scaled to [0, 1].

        Raises:
            RowError: the score is outside of the scale, or a cell is empty or of another type.
        """
        first, second, language, score = _read(self, row)
        if not self.lowest <= score <= self.highest:
            raise RowError(f"the score is outside of {self.lowest:g} to {self.highest:g}")
        similarity = (score - self.lowest) / (self.highest - self.lowest)
        made = record_of(dataset, first, [second], origin=[row.origin], language=language)
        return [replace(made, similarity=similarity)]


def _read(source: STSSource | GradedSource, row: Row) -> tuple[str, str, str | None, float]:
    """Read both sentences, the language and the score of a row."""
    language = text_in(row.values, source.language) if source.language else None
    first = text_in(row.values, source.first)
    second = text_in(row.values, source.second)
    if not first or not second:
        raise RowError("a sentence is missing or empty")
    return first, second, language, number_in(row.values, source.score)

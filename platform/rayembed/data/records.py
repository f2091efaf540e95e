"""The record: one row of training data in memory; `parts` defines its columns in files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayembed.config.types import has_content
from rayembed.errors import DataError


@dataclass(frozen=True)
class Negative:
    """A hard negative, with the teacher, rule, rank and scores by which it was chosen."""

    text: str
    rank: int | None = None
    score: float | None = None
    rule: str = "given"
    teacher: str | None = None
    cross_score: float | None = None


@dataclass(frozen=True)
class Record:
    """One training row: a query, its positives and its hard negatives."""

    id: str
    query: str
    positives: tuple[str, ...]
    dataset: str
    negatives: tuple[Negative, ...] = ()
    task: str = "retrieval"
    query_instruction: str = ""
    document_instruction: str = ""
    in_batch: bool = True
    label: str | None = None
    positive_score: float | None = None
    """The teacher's score of the first positive, if the row was mined."""
    language: str | None = None
    origin: tuple[str, ...] = ()
    """Source rows that the record was made from."""
    false_negatives: tuple[int, ...] = ()
    """`words.normalised_hash` of documents that may share a batch with the query but are not
    negatives of it."""
    similarity: float | None = None
    """Graded similarity of query and first positive in [0, 1]; None: the positive answers it."""
    positive_cross_score: float | None = None
    """The cross-encoder's score of the first positive, if the row was rescored."""
    positive_scores: tuple[float | None, ...] | None = None
    """The teacher's score of each positive, if the row was mined and has several."""
    positive_cross_scores: tuple[float | None, ...] | None = None
    """The cross-encoder's score of each positive, if the row was rescored and has several."""
    negatives_copied: int = 0
    """Number of negatives that were left out as copies of the query or a positive; not stored."""
    pair_rule: str | None = None
    """Rule by which the source made the pair, where it has several."""

    def to_row(self) -> dict[str, Any]:
        """Convert the record to a row of `parts.SCHEMA`."""
        # Not `asdict`, which copies every value deeply: with seven negatives 20 times as slow.
        return vars(self) | {"negatives": [vars(negative) for negative in self.negatives]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Record":
        """Convert a row of `parts.SCHEMA` to a record.

        Raises:
            DataError: no query, or no positive; the message names the row.
        """
        problem = reject_reason(row)
        if problem:
            raise DataError(f"record {row.get('id')!r} of {row.get('dataset')!r}: {problem}")
        values = dict(row)
        values["positives"] = tuple(row["positives"])
        values["negatives"] = tuple(Negative(**dict(n)) for n in row.get("negatives") or ())
        values["origin"] = tuple(row.get("origin") or ())
        values["false_negatives"] = tuple(row.get("false_negatives") or ())
        for name in ("positive_scores", "positive_cross_scores"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def reject_reason(row: Mapping[str, Any]) -> str | None:
    """Return the reason why a row cannot become a record; None if it can.

    `no query` or `no positive` (missing, of another type, or space alone), `query has no visible
    character`, `positive has no visible character`, `positive equals query`.
    """
    query = row.get("query")
    if not isinstance(query, str) or not query.strip():
        return "no query"
    if not has_content(query):
        return "query has no visible character"
    given = [p for p in row.get("positives") or () if isinstance(p, str) and p.strip()]
    if not given:
        return "no positive"
    positives = [positive for positive in given if has_content(positive)]
    if not positives:
        return "positive has no visible character"
    if all(positive == query for positive in positives):
        return "positive equals query"
    return None

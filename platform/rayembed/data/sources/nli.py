"""Natural-language inference: all rows of a premise become one record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import NLISource
from rayembed.data.records import Record
from rayembed.data.shuffle import Bucket, Scatter, bucket_of, gather
from rayembed.data.sources.building import record_of
from rayembed.data.sources.cells import RowError, is_unicode, name_in, text_in
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.kinds import columns_of
from rayembed.data.sources.rows import BadRow, Row, read_rows
from rayembed.data.sources.tasks import NO_ENTAILMENT, HeldOut, RecordWriter
from rayembed.data.work_items import Result

Relation = Literal["entailment", "contradiction", "other"]

_SCHEMA = pa.schema(
    [
        ("premise", pa.string()),
        ("hypothesis", pa.string()),
        ("relation", pa.string()),
        ("language", pa.string()),
        ("origin", pa.string()),
    ]
)


@dataclass(frozen=True)
class ScatterPremises:
    """Task: scatter a piece's rows by premise; unreadable rows are rejected."""

    folder: str
    scattered: str
    dataset: DatasetConfig
    buckets: int

    def __call__(self, item: FilePiece) -> Result:
        """Report file names in `scattered`; rows in are the rejected ones, others are counted
        later.
        """
        source = self.dataset.source
        assert isinstance(source, NLISource)
        writer = RecordWriter(self.folder, HeldOut())
        scatter = Scatter(self.scattered, _SCHEMA, self.buckets)
        for row in read_rows(item, columns_of(source).values()):
            if isinstance(row, BadRow):
                writer.reject(row.reason, row.shown)
                continue
            try:
                told = _told(source, row)
            except RowError as problem:
                writer.reject(str(problem), row.values)
            else:
                scatter.add(bucket_of(told["premise"], self.buckets), told)
        return {**writer.finish(), "scattered": scatter.finish()}


@dataclass(frozen=True)
class ConvertPremises:
    """Task: make the records of a bucket's premises, in the order of their first rows."""

    folder: str
    scattered: str
    files: tuple[str, ...]
    """Scattered files of all pieces."""
    buckets: int
    dataset: DatasetConfig
    held_out: HeldOut

    def __call__(self, item: Bucket) -> Result:
        """Report `parts`, counts and examples of rejected rows."""
        by_premise: dict[str, list[dict[str, Any]]] = {}
        for row in gather(self.scattered, self.files, item.number):
            by_premise.setdefault(row["premise"], []).append(row)
        writer = RecordWriter(self.folder, self.held_out)
        for rows in by_premise.values():
            try:
                made = _record(self.dataset, rows)
            except RowError as problem:
                writer.reject(str(problem), rows[0], len(rows))
            else:
                writer.take([made], rows[0], len(rows))
        return writer.finish()


def _told(source: NLISource, row: Row) -> dict[str, Any]:
    values = row.values
    premise, hypothesis = text_in(values, source.premise), text_in(values, source.hypothesis)
    if not premise or not hypothesis:
        raise RowError("no premise" if not premise else "no hypothesis")
    language = text_in(values, source.language) if source.language else None
    if not all(map(is_unicode, (premise, hypothesis, language or ""))):
        raise RowError("not valid Unicode")
    label = name_in(values, source.label)
    relation: Relation = "other"
    if label == source.entailment:
        relation = "entailment"
    elif label == source.contradiction:
        relation = "contradiction"
    return {
        "premise": premise,
        "hypothesis": hypothesis,
        "relation": relation,
        "language": language,
        "origin": row.origin,
    }


def _record(dataset: DatasetConfig, rows: Sequence[dict[str, Any]]) -> Record:
    """Record of all rows of a premise."""
    texts: dict[Relation, list[str]] = {"entailment": [], "contradiction": [], "other": []}
    for row in rows:
        texts[row["relation"]].append(row["hypothesis"])
    if not texts["entailment"]:
        raise RowError(NO_ENTAILMENT)
    return record_of(
        dataset,
        rows[0]["premise"],
        texts["entailment"],
        texts["contradiction"],
        origin=[row["origin"] for row in rows],
        language=next((row["language"] for row in rows if row["language"]), None),
    )

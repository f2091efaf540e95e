"""Source of natural-language inference: all rows with the same premise become one record.

Rows are scattered into buckets by their premise, and each bucket is converted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed.config.sources import Column
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.file_rows import Conversion, FileRows, record_of

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.engine.exchange import Buckets
    from rayembed.data.engine.shuffle import Bucket
    from rayembed.data.engine.work_items import Result
    from rayembed.data.records import Record
    from rayembed.data.sources.files import FilePiece
    from rayembed.data.sources.rows import Row
    from rayembed.data.sources.tasks import HeldOut

NO_ENTAILMENT = "premise without entailment"


class NLISource(FileRows):
    """A premise, a hypothesis and their relation in each row: natural-language inference.

    All rows of a premise become one record: entailed hypotheses are its positives, contradicting
    ones its negatives; a premise that entails nothing is rejected.
    """

    columns_read: ClassVar = ("premise", "hypothesis", "label")
    tolerated: ClassVar = frozenset({NO_ENTAILMENT})

    kind: Literal["nli"] = "nli"
    premise: Column = "premise"
    hypothesis: Column = "hypothesis"
    label: Column = "label"
    entailment: str = "0"
    """Value of `label` for entailment; numbers are compared by their digits."""
    contradiction: str = "2"
    """Value of `label` for contradiction."""

    @property
    def brings_negatives(self) -> bool:
        """Always true, since contradicting hypotheses become hard negatives."""
        return True

    @property
    def draws_by_seed(self) -> bool:
        """Always false, since the conversion draws nothing at random."""
        return False

    def convert(self, conversion: Conversion) -> list[Result]:
        """Shuffle the rows into buckets by premise, and make a record of each premise."""
        from rayembed.assets.storage import join
        from rayembed.data.engine.shuffle import Bucket, number_of_buckets

        dataset, writer = conversion.dataset, conversion.writer
        folder = join(writer.working_folder, "scattered")
        pieces = conversion.files["path"]
        buckets = number_of_buckets(sum(piece.size for piece in pieces))
        scatter = ScatterPremises(writer.parts_folder, folder, self, buckets)
        sent = conversion.prepare("scatter", scatter, pieces)
        rows = conversion.forwarded("premises", folder, sent, buckets)
        task = ConvertPremises(writer.parts_folder, rows, dataset, conversion.held_out)
        made = conversion.run("records", task, [Bucket(number) for number in range(buckets)])
        return [*sent, *made]


@dataclass(frozen=True)
class ScatterPremises:
    """Task: send each row of a piece to the bucket of its premise; unreadable rows are rejected."""

    folder: str
    scattered: str
    source: NLISource
    buckets: int

    def __call__(self, item: FilePiece) -> Result:
        """Return names of files with `scattered` rows, and counts of rejected rows; the others are
        counted in the next task.
        """
        import pyarrow as pa

        from rayembed.data.engine.shuffle import Scatter, bucket_of
        from rayembed.data.sources.tasks import RecordWriter, converted

        names = ("premise", "hypothesis", "relation", "language", "origin")
        schema = pa.schema([(name, pa.string()) for name in names])
        writer = RecordWriter(self.folder)
        scatter = Scatter(self.scattered, schema, self.buckets)
        columns = self.source.columns.values()
        for row, told in converted(item, columns, partial(_told, self.source)):
            if isinstance(told, str):
                writer.reject(told, row.shown)
            else:
                scatter.add(bucket_of(told["premise"], self.buckets), told)
        return {**writer.finish(), "scattered": scatter.finish()}


@dataclass(frozen=True)
class ConvertPremises:
    """Task: make a record of each premise in a bucket, in the order of the premises' first rows."""

    folder: str
    premises: Buckets
    dataset: DatasetConfig
    held_out: HeldOut

    def __call__(self, item: Bucket) -> Result:
        """Run the task; its result has `parts`, counts and examples of rejected rows."""
        from rayembed.data.sources.tasks import RecordWriter

        by_premise: dict[str, list[dict[str, Any]]] = {}
        for row in self.premises.records(item.number):
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
    relations = {source.contradiction: "contradiction", source.entailment: "entailment"}
    return {
        "premise": premise,
        "hypothesis": hypothesis,
        "relation": relations.get(name_in(values, source.label) or ""),
        "language": language,
        "origin": row.origin,
    }


def _record(dataset: DatasetConfig, rows: Sequence[dict[str, Any]]) -> Record:
    """Make the record of a premise from all its rows."""
    entailed, contradicting = (
        [row["hypothesis"] for row in rows if row["relation"] == relation]
        for relation in ("entailment", "contradiction")
    )
    if not entailed:
        raise RowError(NO_ENTAILMENT)
    return record_of(
        dataset,
        rows[0]["premise"],
        entailed,
        contradicting,
        origin=[row["origin"] for row in rows],
        language=next((row["language"] for row in rows if row["language"]), None),
    )

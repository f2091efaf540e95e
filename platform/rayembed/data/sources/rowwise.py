"""Conversion task for sources whose rows become records individually."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import ClassesSource, GradedSource, PairsSource
from rayembed.data.records import Record
from rayembed.data.sources.cells import RowError
from rayembed.data.sources.classes import ExampleFiles, class_record, open_examples
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.kinds import columns_of
from rayembed.data.sources.pairs import graded_record, pair_records, sts_records
from rayembed.data.sources.rows import BadRow, Row, read_rows
from rayembed.data.sources.tasks import HeldOut, RecordWriter
from rayembed.data.work_items import Result


@dataclass(frozen=True)
class ConvertRows:
    """Task: convert a piece of pairs, sentences or classification texts."""

    folder: str
    dataset: DatasetConfig
    held_out: HeldOut
    seed: int = 0
    examples: ExampleFiles = field(default_factory=ExampleFiles)
    """Example pool for classification texts."""

    def __call__(self, item: FilePiece) -> Result:
        """Report `parts`, counts and examples of rejected rows."""
        writer = RecordWriter(self.folder, self.held_out)
        columns = columns_of(self.dataset.source).values()
        for row, made in converted(self.dataset, item, columns, self.seed, self.examples):
            shown = row.shown if isinstance(row, BadRow) else row.values
            if isinstance(made, str):
                writer.reject(made, shown)
            else:
                writer.take(made, shown)
        return writer.finish()


def converted(
    dataset: DatasetConfig,
    piece: FilePiece,
    columns: Collection[str],
    seed: int = 0,
    examples: ExampleFiles | None = None,
) -> Iterator[tuple[Row | BadRow, list[Record] | str]]:
    """Each row of a piece with its records, or with the reason why it has none.

    Args:
        columns: those that are read.
    """
    for row in read_rows(piece, columns):
        if isinstance(row, BadRow):
            yield row, row.reason
            continue
        try:
            yield row, _records(dataset, piece, row, seed, examples or ExampleFiles())
        except RowError as problem:
            yield row, str(problem)


def _records(
    dataset: DatasetConfig, piece: FilePiece, row: Row, seed: int, examples: ExampleFiles
) -> list[Record]:
    match dataset.source:
        case PairsSource():
            json_lists = piece.kind in ("csv", "tsv")
            return pair_records(dataset, row.values, row.origin, json_lists=json_lists)
        case ClassesSource(names=names):
            opened = open_examples(examples, seed, tuple(sorted(names.values())))
            return [class_record(dataset, row.values, row.origin, opened)]
        case GradedSource():
            return [graded_record(dataset, row.values, row.origin)]
        case _:
            return sts_records(dataset, row.values, row.origin)

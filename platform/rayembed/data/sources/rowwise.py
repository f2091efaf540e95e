"""Conversion task for sources whose rows become records individually."""

from dataclasses import dataclass, field

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import ClassesSource, PairsSource
from rayembed.data.records import Record
from rayembed.data.sources.cells import RowError
from rayembed.data.sources.classes import ExampleFiles, class_record, open_examples
from rayembed.data.sources.files import Piece
from rayembed.data.sources.kinds import columns_of
from rayembed.data.sources.pairs import pair_records, sts_records
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

    def __call__(self, item: Piece) -> Result:
        """Report `parts`, counts and examples of rejected rows."""
        writer = RecordWriter(self.folder, self.held_out)
        columns = columns_of(self.dataset.source).values()
        for row in read_rows(item, columns):
            if isinstance(row, BadRow):
                writer.reject(row.reason, row.shown)
                continue
            try:
                made = self._records(item, row)
            except RowError as problem:
                writer.reject(str(problem), row.values)
            else:
                writer.take(made, row.values)
        return writer.finish()

    def _records(self, piece: Piece, row: Row) -> list[Record]:
        match self.dataset.source:
            case PairsSource():
                json_lists = piece.kind in ("csv", "tsv")
                return pair_records(self.dataset, row.values, row.origin, json_lists=json_lists)
            case ClassesSource(names=names):
                examples = open_examples(self.examples, self.seed, tuple(sorted(names.values())))
                return [class_record(self.dataset, row.values, row.origin, examples)]
            case _:
                return sts_records(self.dataset, row.values, row.origin)

"""Conversion tasks: write parts of records, reject unusable rows with reasons, and raise if too
many are rejected.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import file_name, join
from rayembed.config.data import DatasetConfig
from rayembed.data.engine.parts import Part, read_records, remedy, rows_per_part, write_part
from rayembed.data.engine.work_items import Result, add_up
from rayembed.data.hashes import label_hash
from rayembed.data.records import Record
from rayembed.data.sources.cells import RowError, name_in
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import BadRow, Row, read_rows
from rayembed.data.words import normalised_hash
from rayembed.errors import DataError

_Made = TypeVar("_Made")

_BYTES_OF_A_ROW = 1024
"""Assumed size in bytes of a source's rows until they are read."""

EXAMPLES_PER_ITEM = 3
_EXAMPLES_SHOWN = 5
_SHOWN_CHARACTERS = 300

HELD_OUT_TEXT = "has a held-out text"
HELD_OUT_ROW = "held out"
NOT_BAD = frozenset({HELD_OUT_TEXT, HELD_OUT_ROW})
"""Rejection reasons of good rows of any source; they do not count against `max_rejected_share`."""


@dataclass(frozen=True)
class HeldOutRows:
    """Held-out rows of one data set, recognised by the hashes of their texts."""

    documents: frozenset[int]
    """`normalised_hash` of the held-out documents."""
    queries: frozenset[int] | None = None
    """`normalised_hash` of the held-out queries; None: every query of a held-out document."""

    def has(self, record: Record) -> bool:
        """Whether the record's row is held out: one of its positives is, and so is its query."""
        if self.queries is not None and normalised_hash(record.query) not in self.queries:
            return False
        return any(normalised_hash(text) in self.documents for text in record.positives)


@dataclass(frozen=True)
class HeldOut:
    """Rows and texts that must not be trained on because they are held out for evaluation."""

    texts: frozenset[int] = frozenset()
    """`normalised_hash` of the texts that an evaluation may show."""
    rows: HeldOutRows | None = None
    """Rows that the converted data set holds out; None: it holds out none."""

    def touches(self, record: Record) -> bool:
        """Whether the record's query or one of its positives is held out."""
        return bool(self.texts) and any(map(self._has, (record.query, *record.positives)))

    def without_negatives(self, record: Record) -> tuple[Record, int]:
        """Copy the record without held-out negatives; also return how many were removed.

        A row is worth more than one of its negatives: with seven of each and a tenth of the
        documents held out, half of all rows have a held-out one.
        """
        if not self.texts or not record.negatives:
            return record, 0
        kept = tuple(negative for negative in record.negatives if not self._has(negative.text))
        lost = len(record.negatives) - len(kept)
        return (replace(record, negatives=kept) if lost else record), lost

    def _has(self, text: str) -> bool:
        return normalised_hash(text) in self.texts


_INDEX = "rows-"
"""Prefix of the file name of a row index, followed by the piece's key."""


@dataclass
class RowIndex:
    """Hashes of converted rows' texts and groups, from which the held-out rows are chosen.

    A row with several records is known by its first: the others have the same texts.
    """

    sizes: list[int] = field(default_factory=list)
    """Number of records of each row."""
    copied: list[int] = field(default_factory=list)
    """`negatives_copied` of each row's first record, which parts do not store."""
    groups: list[int] = field(default_factory=list)
    """`label_hash` of each row's cell in the column by which rows are held out."""
    queries: list[int] = field(default_factory=list)
    """`normalised_hash` of each row's query."""
    positives: list[int] = field(default_factory=list)
    """Number of positives of each row."""
    documents: list[int] = field(default_factory=list)
    """`normalised_hash` of all positives, row by row."""

    def add(self, records: Sequence[Record], group: str | None) -> None:
        """Add a row, given its records and its cell in the column by which rows are held out."""
        first = records[0]
        self.sizes.append(len(records))
        self.copied.append(first.negatives_copied)
        self.groups.append(label_hash(group))
        self.queries.append(normalised_hash(first.query))
        self.positives.append(len(first.positives))
        self.documents += map(normalised_hash, first.positives)

    def save(self, folder: str, key: str) -> str:
        """Write the index of a piece into a folder, and return the file's name."""
        name = f"{_INDEX}{key}.npz"
        arrays = {what: np.array(hashes, np.int64) for what, hashes in vars(self).items()}
        save_arrays(join(folder, name), **arrays)
        return name


@dataclass(frozen=True)
class ConvertedRows:
    """Work item: the converted records of the rows of one piece."""

    parts: tuple[Part, ...]
    index_path: str

    @property
    def key(self) -> str:
        """Key of the piece of the source, which identifies the work item."""
        return file_name(self.index_path).removeprefix(_INDEX).removesuffix(".npz")

    def index(self) -> Mapping[str, np.ndarray]:
        """Load the arrays of the piece's `RowIndex`."""
        return load_arrays(self.index_path, remedy(self.index_path))

    def rows(self) -> Iterator[list[Record]]:
        """Yield the records of each row of the piece."""
        records = (record for part in self.parts for record in read_records(part.path))
        index = self.index()
        for size, copied in zip(index["sizes"].tolist(), index["copied"].tolist(), strict=True):
            first, *others = islice(records, size)
            yield [replace(first, negatives_copied=copied), *others]


_NOTHING = HeldOut()


class RecordWriter:
    """Collects the records and rejections of one task, and writes a part whenever it is
    full.

    Args:
        source_bytes: size of the source, which decides the rows of a part.
        indexed: whether a `RowIndex` of the rows that are not rejected is written.
    """

    def __init__(
        self,
        folder: str,
        held_out: HeldOut = _NOTHING,
        source_bytes: int = 0,
        *,
        indexed: bool = False,
    ) -> None:
        self.folder, self.held_out = folder, held_out
        self.index = RowIndex() if indexed else None
        self.rows_per_part = rows_per_part(source_bytes // _BYTES_OF_A_ROW)
        self.waiting: list[Record] = []
        self.parts: list[Part] = []
        self.rows_used = 0
        self.rejected: dict[str, int] = {}
        self.pair_rules: Counter[str] = Counter()
        self.negatives_held_out = 0
        self.negatives_copied = 0
        self.examples: list[dict[str, str]] = []

    def take(
        self, records: Sequence[Record], shown: Any, rows: int = 1, group: str | None = None
    ) -> None:
        """Add the records made from `rows` source rows, or reject them if they are held out or have
        a held-out text.

        Args:
            group: cell of the column by which rows are held out.
        """
        own = self.held_out.rows
        if own is not None and own.has(records[0]):
            self.reject(HELD_OUT_ROW, shown, rows)
            return
        if any(map(self.held_out.touches, records)):
            self.reject(HELD_OUT_TEXT, shown, rows)
            return
        self.rows_used += rows
        if self.index is not None:
            self.index.add(records, group)
        for record in records:
            kept, lost = self.held_out.without_negatives(record)
            self.negatives_held_out += lost
            self.negatives_copied += record.negatives_copied
            if record.pair_rule is not None:
                self.pair_rules[record.pair_rule] += 1
            self.waiting.append(kept)
            if len(self.waiting) == self.rows_per_part:
                self._flush()

    def reject(self, reason: str, shown: Any, rows: int = 1) -> None:
        """Count rows as rejected, keeping some examples."""
        self.rejected[reason] = self.rejected.get(reason, 0) + rows
        seen = sum(example["reason"] == reason for example in self.examples)
        if seen < EXAMPLES_PER_ITEM:
            text = str(shown)[:_SHOWN_CHARACTERS].encode("utf-8", "replace").decode()
            self.examples.append({"reason": reason, "row": text})

    def finish(self, key: str = "") -> Result:
        """Write the remaining records, and return `parts`, counts, examples of rejected rows, and
        the file of the piece's `index`.
        """
        self._flush()
        index = {} if self.index is None else {"index": self.index.save(self.folder, key)}
        return {
            **index,
            "rows_in": self.rows_used + sum(self.rejected.values()),
            "rows_used": self.rows_used,
            "rows_out": sum(part.rows for part in self.parts),
            "rejected": self.rejected,
            "negatives_held_out": self.negatives_held_out,
            "negatives_copied": self.negatives_copied,
            "pair_rules": self.pair_rules,
            "examples": self.examples,
            "parts": [[part.name, part.rows] for part in self.parts],
        }

    def _flush(self) -> None:
        if self.waiting:
            self.parts.append(write_part(self.folder, self.waiting))
            self.waiting = []


@dataclass(frozen=True)
class ConvertRows:
    """Task: convert each row of a piece to records, independently of other rows."""

    folder: str
    held_out: HeldOut
    columns: tuple[str, ...]
    """Columns that are read."""
    make: Callable[[Row], list[Record]]
    """Records of a row; raises `RowError` where it has none."""
    source_bytes: int = 0
    """Size of the source, which decides the rows of a part."""
    indexed: bool = False
    """Whether an index of the rows is written."""
    column: str | None = None
    """Column by which rows are held out."""

    def __call__(self, item: FilePiece) -> Result:
        """Run the task; its result has `parts`, counts and examples of rejected rows."""
        writer = RecordWriter(self.folder, self.held_out, self.source_bytes, indexed=self.indexed)
        for row, made in converted(item, self.columns, self.make):
            if isinstance(made, str):
                writer.reject(made, row.shown)
            else:
                assert isinstance(row, Row)
                writer.take(made, row.values, group=group_of(row, self.column))
        return writer.finish(item.key)


def group_of(row: Row | BadRow, column: str | None) -> str | None:
    """Return the cell of the column by which rows are held out; None if the row belongs to no
    group.
    """
    try:
        return name_in(row.values, column) if column and isinstance(row, Row) else None
    except RowError:
        return None


def converted(
    piece: FilePiece, columns: Collection[str], make: Callable[[Row], _Made]
) -> Iterator[tuple[Row | BadRow, _Made | str]]:
    """Convert each row of a piece; yield the row with its records, or with the reason to
    reject it.
    """
    for row in read_rows(piece, columns):
        if isinstance(row, BadRow):
            yield row, row.reason
            continue
        try:
            yield row, make(row)
        except RowError as problem:
            yield row, str(problem)


def summary_of(results: Sequence[Result]) -> dict[str, Any]:
    """Sum the results of conversion tasks into manifest entries about rows and records."""
    rows_in, made, rejected = add_up(results)
    examples = [example for result in results for example in result["examples"]]
    return {
        "rows_in": rows_in,
        "records_made": made,
        "rejected": rejected,
        "examples": examples[:_EXAMPLES_SHOWN],
    }


def accept(dataset: DatasetConfig, told: Mapping[str, Any]) -> None:
    """Raise if no record could be made, or if too many rows were rejected.

    The share in the settings is not part of the folder's name, so that raising it needs no new
    conversion.

    Args:
        told: a manifest, or as much of it as `summary_of` gives.
    """
    rows_in, rows_out, rejected = told["rows_in"], told["records_made"], told["rejected"]
    path, tolerated = dataset.source.place, NOT_BAD | dataset.source.tolerated
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in told["examples"][:_EXAMPLES_SHOWN])
    counts = counts_of(rejected)
    if rows_out == 0:
        raise DataError(
            f"data set {dataset.name!r} is empty: {path!r} has {rows_in} rows, none usable "
            f"({counts or 'no rows at all'}){shown}"
        )
    bad = sum(count for reason, count in rejected.items() if reason not in tolerated)
    share = getattr(dataset.source, "max_rejected_share", 1.0)
    if bad > share * rows_in:
        raise DataError(
            f"data set {dataset.name!r}: {bad} of {rows_in} rows of {path!r} were rejected "
            f"({counts}), more than the allowed share {share:g}. Correct the rows, or set "
            f"data.datasets.{dataset.name}.source.max_rejected_share to "
            f"{math.ceil(100 * bad / rows_in) / 100:g} or more. For instance:{shown}"
        )


def counts_of(rejected: Mapping[str, int]) -> str:
    """Write counts by reason as a text, such as "3 × no query, 1 × no positive"."""
    return ", ".join(f"{count:,} × {reason}" for reason, count in rejected.items())

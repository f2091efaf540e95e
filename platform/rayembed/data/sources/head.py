"""What the head of a data set's files tells before any work: columns, rows, what becomes of them.

Reads files of this machine alone, small ones whole and of large ones the first rows.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source
from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import HeldOutFraction, HeldOutGroups, HeldOutIds
from rayembed.data.held_out.choice import listed_values
from rayembed.data.records import Record
from rayembed.data.sources.cells import RowError, name_in
from rayembed.data.sources.check import with_source_path
from rayembed.data.sources.file_rows import FileRows
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import BadRow, Row, read_rows
from rayembed.data.sources.tasks import NOT_BAD, converted
from rayembed.data.sources.unread import unread_columns
from rayembed.data.sources.versions import state_of
from rayembed.errors import RayembedError

_WHOLE_BYTES = 4 << 20
"""Files of so many bytes together are read whole: half a second of CPU."""
_WHOLE_ROWS = 20_000
_FIRST_ROWS = 1000
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Head:
    """What was read of a data set."""

    dataset: DatasetConfig
    """Settings with whole paths."""
    files: tuple[str, ...]
    """Names of the files at `path`."""
    columns: tuple[str, ...]
    example: str
    """Beginning of the first row."""
    rows: int | None
    """Rows of the files; None: not known without reading them."""
    exact: bool
    """Whether `rows` was counted; else it is estimated by bytes."""
    whole: bool
    """Whether every row was read."""
    read: int
    """Rows that were read."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason → rows read that give no record; empty where rows give none by themselves."""
    examples: tuple[tuple[str, str], ...] = ()
    """Reason and beginning of some rejected rows."""
    records: int | None = None
    """Different records of the rows read; None where rows give none by themselves."""
    documents: int = 0
    """Different positives of these records."""
    listed: int = 0
    """Rows read that the settings hold out by their name in a column."""
    instructions: tuple[str, ...] = ()
    """Different instructions that rows bring along."""
    unread: dict[str, str] = field(default_factory=dict)
    """Column that no setting reads → what it looks like."""

    @property
    def most_records(self) -> int | None:
        """Most records that there can be; None: not known."""
        return self.records if self.whole else None

    @property
    def bad(self) -> int:
        """Rows read that count against `max_rejected_share`."""
        tolerated = NOT_BAD | self.dataset.source.tolerated
        return sum(n for reason, n in self.rejected.items() if reason not in tolerated)

    @property
    def trained_records(self) -> int | None:
        """About how many records are trained on; None: not known."""
        if self.rows is None or self.records is None or not self.read:
            return None
        all_of_read = self.rows / self.read
        left = self.records * all_of_read
        match self.dataset.held_out:
            case HeldOutFraction(share=share, max_queries=most):
                documents = self.documents * all_of_read
                left *= 1 - min(share * documents, most) / max(documents, 1)
            case HeldOutGroups(share=float() as share):
                left *= 1 - share
            case HeldOutGroups() | HeldOutIds():
                left *= 1 - self.listed / self.read
            case None:
                pass
        if self.dataset.sample_share is not None:
            left *= self.dataset.sample_share
        drawn = self.dataset.num_samples
        return round(left if drawn is None else min(left, drawn))


def is_here(dataset: DatasetConfig, root: str) -> bool:
    """Whether the data set is made of rows of files on this machine."""
    source = with_source_path(dataset, root).source
    return isinstance(source, FileRows) and not any("://" in at for at in source.paths.values())


_READ_LATER = frozenset(
    ("cleaning", "num_samples", "sample_share", "consistency", "mining", "repair", "clusters")
)
"""Settings of a data set that a head does not depend on."""


@dataclass(frozen=True)
class _View:
    """A data set and its files, equal to another where a look at both gives the same."""

    seen: str
    dataset: DatasetConfig = field(compare=False)
    source: FileRows = field(compare=False)
    files: Mapping[str, Sequence[FilePiece]] = field(compare=False)
    held_out: frozenset[str] = field(compare=False)


def look(dataset: DatasetConfig, root: str) -> Head:
    """Head of a data set whose files are here, which are read once while they stay as they are.

    Raises:
        RayembedError: no such files, not of a known kind, broken, without a column that a setting
            names, or not in the encoding; the message begins with the setting of their path.
    """
    whole = with_source_path(dataset, root)
    source = whole.source
    assert isinstance(source, FileRows)
    at = f"data.datasets.{dataset.name}.source"
    try:
        files = source.find(versions=False)
        held_out = frozenset(listed_values(whole.held_out, root)) if whole.held_out else frozenset()
        paths = [path for pieces in files.values() for p in pieces for path in p.paths]
        states = [(path, state_of(path)) for path in dict.fromkeys(paths)]
        settings = whole.model_dump_json(exclude=set(_READ_LATER))
        view = _View(repr((settings, sorted(held_out), states)), whole, source, files, held_out)
        return replace(_head(view), dataset=whole)
    except RayembedError as error:
        told = str(error)
        raise type(error)(told if told.startswith("data.datasets.") else f"{at}: {told}") from error


@lru_cache(maxsize=256)
def _head(view: _View) -> Head:
    dataset, source, pieces = view.dataset, view.source, view.files["path"]
    source.check_found(dataset, view.files)
    size = sum(piece.size for piece in pieces)
    whole = size <= _WHOLE_BYTES
    if any(piece.name.endswith(".gz") for piece in pieces):
        whole = size <= _WHOLE_BYTES // 8
    columns = source.columns_looked_up(dataset)
    first = next((row for row in _rows(pieces) if isinstance(row, Row)), None)
    named, values = getattr(dataset.held_out, "column", None), view.held_out
    made = _made(dataset, source, pieces, columns, _WHOLE_ROWS + 1 if whole else _FIRST_ROWS)
    whole, read = whole and len(made) <= _WHOLE_ROWS, len(made)
    rows, exact = (read, True) if whole else _count(pieces, read)
    own = type(source).records is not FileRows.records
    asks = source.instruction_column is not None
    records = [record for one in made if not isinstance(one[1], str) for record in one[1]]
    rejected = [(why, row) for row, why in made if isinstance(why, str)]
    shown: dict[str, str] = {}
    for why, row in rejected:
        shown.setdefault(why, row.shown if isinstance(row, BadRow) else str(row.values))
    return Head(
        dataset,
        tuple(dict.fromkeys(name for piece in pieces for name in piece.names)),
        tuple(first.values) if first is not None else (),
        _shown(first.values) if first is not None else "",
        rows,
        exact,
        whole,
        read,
        dict(Counter(why for why, _ in rejected)),
        tuple((why, _cut(row)) for why, row in shown.items()),
        len({record.id for record in records}) if own else None,
        len({positive for record in records for positive in record.positives}),
        sum(_named(row, named) in values for row, _ in made) if values and named else 0,
        tuple(sorted({record.query_instruction for record in records if asks})),
        unread_columns(pieces, columns),
    )


def _named(row: Row | BadRow, column: str) -> str | None:
    """Name of a row in a column; None: it has none."""
    try:
        return name_in(row.values, column) if isinstance(row, Row) else None
    except RowError:
        return None


Made = list[tuple[Row | BadRow, list[Record] | str]]


def _made(
    dataset: DatasetConfig,
    source: FileRows,
    pieces: Sequence[FilePiece],
    columns: Sequence[str],
    most: int,
) -> Made:
    """The first rows with their records, or the reason why one has none."""

    def nothing(_: Row) -> list[Record]:
        return []

    own = type(source).records is not FileRows.records
    make = partial(source.records, dataset) if own else nothing
    rows = (pair for piece in pieces for pair in converted(piece, columns, make))
    return list(islice(rows, most))


def _rows(pieces: Sequence[FilePiece]) -> Iterator[Row | BadRow]:
    return (row for piece in pieces for row in read_rows(piece))


def _count(pieces: Sequence[FilePiece], read: int) -> tuple[int | None, bool]:
    """Rows of files, and whether they are counted: of Parquet and texts; of others by bytes."""
    if all(piece.kind == "parquet" for piece in pieces):
        return sum(_parquet_rows(path) for path in {piece.path for piece in pieces}), True
    if all(piece.kind == "text" for piece in pieces):
        return sum(len(piece.texts) for piece in pieces), True
    if any(piece.name.endswith(".gz") or piece.kind == "parquet" for piece in pieces):
        return None, False
    filesystem, inside = open_source(pieces[0].path)
    with filesystem.open_input_stream(inside) as stream:
        begin = stream.read(_WHOLE_BYTES)
    lines = begin.count(b"\n")
    size = sum(piece.size for piece in pieces)
    return (round(size * lines / len(begin)), False) if lines and read else (None, False)


def _parquet_rows(path: str) -> int:
    filesystem, inside = open_source(path)
    with filesystem.open_input_file(inside) as file:
        return int(open_parquet(file).metadata.num_rows)


def _shown(row: Mapping[str, Any]) -> str:
    """Beginning of a row, on one line."""
    return " ".join(_cut(json.dumps(row, ensure_ascii=False, default=str)).split())


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"

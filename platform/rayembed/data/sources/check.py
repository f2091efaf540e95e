"""Check a run's sources before any row is converted: files, columns, and a sample of local files
that estimates rows, records and rejections. Imports no torch.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import is_on_hub, open_source
from rayembed.assets.resolver import is_unpacked
from rayembed.assets.storage import below
from rayembed.config.data import DatasetConfig
from rayembed.config.data_run import DataRun, data_of
from rayembed.config.held_out import HeldOutFraction, HeldOutGroups, HeldOutIds
from rayembed.config.run import Run
from rayembed.data.held_out.choice import listed_values
from rayembed.data.records import Record
from rayembed.data.sources.file_rows import FileRows, ResolvedDataset
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.names_beside import shown_names
from rayembed.data.sources.rows import Row, read_rows
from rayembed.data.sources.tasks import NOT_BAD, RecordWriter, converted, group_of
from rayembed.data.sources.unread import check_unread, unread_columns
from rayembed.data.sources.versions import states_now
from rayembed.errors import RayembedError

logger = logging.getLogger(__name__)


def check_source(dataset: DatasetConfig, root: str) -> ResolvedDataset:
    """Check a data set's source and the inputs of its cleaning, before any row is converted.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
        ConfigError: a column that the files do not have, the message names the nearest; a split
            that a task evaluates on or does not have; a package that is not installed.
        AssetError: the hub does not give what a reference names.
    """
    for cleaner in dataset.cleaning.cleaners:
        cleaner.check(f"data.datasets.{dataset.name}.cleaning.{cleaner.kind}")
    whole = with_source_path(dataset, root)
    resolved: ResolvedDataset = whole.source.check(whole)
    return resolved


def with_source_path(dataset: DatasetConfig, root: str) -> DatasetConfig:
    """Copy the data set with relative source paths resolved below `root`; absolute paths and
    references stay.
    """
    whole = {name: below(root, path) for name, path in dataset.source.paths.items()}
    return dataset.model_copy(update={"source": dataset.source.model_copy(update=whole)})


def check_sources(
    run: DataRun, names: Collection[str] | None = None, checked: Sequence[ResolvedDataset] = ()
) -> list[ResolvedDataset]:
    """Check that the data sets' sources exist and have the columns that settings name; return the
    resolved data sets.

    Needs no download, so that it can run before one.

    Args:
        checked: those that were found already.
    """
    chosen = [d for d in run.data.datasets if names is None or d.name in names]
    known = {one.dataset.name: one for one in checked}
    new = [check_source(d, run.data.root) for d in chosen if d.name not in known]
    for one in new:
        for setting, pieces in one.files.items():
            names_of = list(dict.fromkeys(name for piece in pieces for name in piece.names))
            if len(names_of) > 1:
                logger.info(
                    "data.datasets.%s.source.%s names %d files; reading all of them: %s",
                    *(one.dataset.name, setting, len(names_of), shown_names(names_of)),
                )
        source = one.dataset.source
        if isinstance(source, FileRows) and one.unread:
            read, unread = ", ".join(source.columns.values()), ", ".join(one.unread)
            at = one.dataset.name
            logger.info(
                "data.datasets.%s: reading the columns %s; ignoring the columns %s",
                at,
                read,
                unread,
            )
    known |= {one.dataset.name: one for one in new}
    return [known[dataset.name] for dataset in chosen]


def check_files_at_hand(run: Run) -> list[ResolvedDataset]:
    """Check the stages' data files, except those that need a download or unpacking.

    What takes no download, for those who are about to begin one.

    Returns:
        The data sets that were checked.

    Raises:
        ConfigError: as `check_source`; or rows have negatives that a stage asks for and nobody
            reads.
        DataError: as `check_source`.
    """
    here = []
    for dataset in run.used_datasets:
        places = dataset.source.paths.values()
        if places and not any(is_on_hub(place) or is_unpacked(place) for place in places):
            here.append(dataset.name)
    found = check_sources(data_of(run), here)
    for checked in found:
        check_unread(run, checked.dataset, checked.unread)
    return found


_WHOLE_BYTES = 4 << 20
"""Total size in bytes up to which files are read completely: half a second of CPU."""
_WHOLE_ROWS = 20_000
_FIRST_ROWS = 1000
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Head:
    """First rows of a data set, and the counts of rows, records and rejections estimated
    from them.
    """

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
    """Whether `rows` was counted rather than estimated; else it is estimated by bytes."""
    whole: bool
    """Whether every row was read."""
    read: int
    """Rows that were read."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason → number of read rows that give no record; empty where rows give none by themselves.
    """
    examples: list[dict[str, str]] = field(default_factory=list)
    """`reason` and beginning of some rejected rows (`row`)."""
    records: int | None = None
    """Number of distinct records of the rows read; None where rows give none by themselves."""
    documents: int = 0
    """Number of distinct positives of these records."""
    listed: int = 0
    """Number of read rows that the settings hold out by their name in a column."""
    instructions: tuple[str, ...] = ()
    """Distinct instructions in a column of the rows."""
    unread: tuple[str, ...] = ()
    """Columns that no setting reads."""

    @property
    def most_records(self) -> int | None:
        """Upper limit of the number of records; None if it is not known."""
        return self.records if self.whole else None

    @property
    def bad(self) -> int:
        """Number of rejected rows in the sample that count against `max_rejected_share`."""
        tolerated = NOT_BAD | self.dataset.source.tolerated
        return sum(n for reason, n in self.rejected.items() if reason not in tolerated)

    @property
    def trained_records(self) -> int | None:
        """Estimated number of training records, without held-out ones; None if it is not known."""
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
    """Whether all files of the data set are on this machine."""
    source = with_source_path(dataset, root).source
    return isinstance(source, FileRows) and not any("://" in at for at in source.paths.values())


_SEEN: dict[str, Head] = {}
"""Cache of heads in this process, by settings and file states."""


def look(dataset: DatasetConfig, root: str) -> Head:
    """Read the first rows of a data set with local files; unchanged files are read only once by a
    process.

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
        states = [
            (piece.path, states_now(piece.path, piece.texts))
            for found in files.values()
            for piece in found
        ]
        seen = repr((whole.model_dump_json(), sorted(held_out), states))
        if seen not in _SEEN:
            source.check_files(whole, files)
            _SEEN[seen] = _head(whole, source, files["path"], held_out)
        return _SEEN[seen]
    except RayembedError as error:
        told = str(error)
        raise type(error)(told if told.startswith("data.datasets.") else f"{at}: {told}") from error


def _head(
    dataset: DatasetConfig,
    source: FileRows,
    pieces: Sequence[FilePiece],
    held_out: frozenset[str],
) -> Head:
    size = sum(piece.size for piece in pieces)
    whole = size <= _WHOLE_BYTES
    if any(piece.name.endswith(".gz") for piece in pieces):
        whole = size <= _WHOLE_BYTES // 8
    columns = source.columns_looked_up(dataset)
    rows_read = (row for piece in pieces for row in read_rows(piece))
    first = next((row.values for row in rows_read if isinstance(row, Row)), {})
    named = getattr(dataset.held_out, "column", None)
    own = type(source).records is not FileRows.records
    make: Callable[[Row], list[Record]] = partial(source.records, dataset) if own else lambda _: []
    rows_made = (pair for piece in pieces for pair in converted(piece, columns, make))
    made = list(islice(rows_made, _WHOLE_ROWS + 1 if whole else _FIRST_ROWS))
    whole, read = whole and len(made) <= _WHOLE_ROWS, len(made)
    rows, exact = (read, True) if whole else _count(pieces, read)
    asks = source.instruction_column is not None
    records = [record for one in made if not isinstance(one[1], str) for record in one[1]]
    counts = RecordWriter("")
    for row, why in made:
        if isinstance(why, str):
            counts.reject(why, row.shown)
    return Head(
        dataset,
        tuple(dict.fromkeys(name for piece in pieces for name in piece.names)),
        tuple(first),
        _shown(first) if first else "",
        rows,
        exact,
        whole,
        read,
        counts.rejected,
        counts.examples,
        len({record.id for record in records}) if own else None,
        len({positive for record in records for positive in record.positives}),
        sum(group_of(row, named) in held_out for row, _ in made) if held_out else 0,
        tuple(sorted({record.query_instruction for record in records if asks})),
        unread_columns(pieces, columns),
    )


def _count(pieces: Sequence[FilePiece], read: int) -> tuple[int | None, bool]:
    """Count the rows of Parquet or text files, or estimate them by the size of other files; returns
    the number and whether it is exact.
    """
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
    """Return the beginning of a row as one line of JSON."""
    text = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return " ".join(cut.split())

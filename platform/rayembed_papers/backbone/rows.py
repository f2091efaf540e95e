"""Read rows of public data sets once from the hub, check them, and store them for all trials."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import pyarrow as pa

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.hub_client import with_retries
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.document import fingerprint
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.rows import BadRow, check_columns, read_rows
from rayembed.errors import ConfigError, DataError
from rayembed_papers.backbone.tasks import Finetuning, Kind, Row, TaskRows

logger = logging.getLogger(__name__)

_PREPARED_AT_ONCE = 8

_UNNAMED_TAG = "_"
"""Tag in Universal Dependencies for a word without part of speech; XTREME-R uses `X`."""


@dataclass(frozen=True)
class StoredRows:
    """Checked rows of a data set in storage."""

    path: str
    version: str
    """Fingerprint of the rows' content and of the selection from it."""


def prepare(
    finetunings: Iterable[Finetuning], folder: str, root: str | None
) -> dict[TaskRows, StoredRows]:
    """Store all rows that the finetunings read in the folder, unless they exist.

    Args:
        folder: in storage.
        root: folder or prefix with copies of the data sets; None: the hub.

    Raises:
        DataError: no such files, columns or labels, or a cell that the task cannot be made of.
        AssetError: the hub does not give them.
        ArtifactError: a file cannot be read, or storage cannot be written.
    """
    wanted: dict[TaskRows, Finetuning] = {}
    for finetuning in finetunings:
        for rows in finetuning.all_rows:
            wanted.setdefault(rows, finetuning)
    with ThreadPoolExecutor(_PREPARED_AT_ONCE) as pool:  # most of the time waits for the hub
        prepared = pool.map(_prepared, wanted, wanted.values(), repeat(folder), repeat(root))
        return dict(zip(wanted, prepared, strict=True))


def load(stored: StoredRows) -> list[Row]:
    """Load stored rows; class labels are numbered from 0.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    remedy = "Remove it and run the same command again, which reads the rows again"
    table = read_sealed(stored.path, remedy=remedy)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _prepared(rows: TaskRows, finetuning: Finetuning, folder: str, root: str | None) -> StoredRows:
    place = place_of(rows, root)
    pieces = with_retries(lambda: list_pieces(place), place)
    checked = (finetuning.kind, finetuning.labels, finetuning.first_label)
    version = fingerprint([asdict(rows), [piece.key for piece in pieces], checked])
    stored = StoredRows(join(folder, f"{version}.parquet"), version)
    if not exists(stored.path):
        found = with_retries(lambda: _read(rows, pieces), place)
        made = [_checked(row, finetuning, origin) for origin, row in found]
        if not made:
            raise DataError(
                f"there are no rows of the task {finetuning.name} in {place!r}{_which(rows)}"
            )
        _store(made, stored.path)
        logger.info("task %s: stored %d rows of %s", finetuning.name, len(made), place)
    return stored


def place_of(rows: TaskRows, root: str | None) -> str:
    """Path pattern of the files on the hub, or below a folder of copies."""
    if root is None:
        return f"hf://datasets/{rows.repository}@{rows.revision}/{rows.path}"
    return join(root, rows.repository, rows.path)


def _which(rows: TaskRows) -> str:
    return "" if rows.where is None else f" whose {rows.where[0]!r} begins with {rows.where[1]!r}"


def _read(rows: TaskRows, pieces: list[FilePiece]) -> list[tuple[str, Row]]:
    try:
        check_columns(pieces[0], {f"column {name}": name for name in rows.needed})
    except ConfigError as error:  # of the data set here, not of a setting
        raise DataError(
            f"the data set {rows.repository!r} does not have the expected columns: {error}"
        ) from error
    return [found for piece in pieces for found in _of_piece(rows, piece)]


def _of_piece(rows: TaskRows, piece: FilePiece) -> Iterator[tuple[str, Row]]:
    for row in read_rows(piece, rows.needed):
        if isinstance(row, BadRow):
            raise DataError(f"row {row.origin} of {piece.path!r}: {row.reason}: {row.shown}")
        if rows.where is None or str(row.values[rows.where[0]]).startswith(rows.where[1]):
            origin = f"{rows.repository}/{row.origin}"
            yield origin, tuple(row.values[name] for name in rows.columns)


def _checked(row: Row, finetuning: Finetuning, origin: str) -> Row:
    """Return the row with class labels numbered from 0; raise if it cannot be used.

    Raises:
        DataError: a cell is missing, of another type, or a label that is not known.
    """
    problem = _problem(row, finetuning.kind)
    if problem:
        raise DataError(f"row {origin} cannot be used for {finetuning.name}: {problem}")
    match finetuning.kind:
        case "classes" | "choices":
            most = len(finetuning.labels) if finetuning.kind == "classes" else len(row) - 3
            number = _number(row[-1], finetuning.first_label)
            if number is None or not 0 <= number < most:
                last = finetuning.first_label + most - 1
                raise DataError(
                    f"row {origin} of {finetuning.name} has the label {row[-1]!r}; expected a "
                    f"number from {finetuning.first_label} to {last}"
                )
            return (*row[:-1], number)
        case "tags":
            return (row[0], [_tag(tag, finetuning, origin) for tag in row[1]])
        case "score":
            return (*row[:-1], float(row[-1]))
        case _:
            return row


def _problem(row: Row, kind: Kind) -> str:
    """Say why a row cannot be used; empty if it can."""
    if any(cell is None for cell in row):
        return f"an empty cell in {row!r}"[:300]
    texts = {"classes": row[:-1], "score": row[:-1], "choices": row[:-1], "spans": row[:2]}
    if any(not isinstance(cell, str) for cell in texts.get(kind, row if kind != "tags" else ())):
        return f"a value that must be a text is not a text in {row!r}"[:300]
    if kind == "tags" and (not row[0] or len(row[0]) != len(row[1])):
        return f"{len(row[0])} words and {len(row[1])} tags"
    if kind == "spans":
        answers: Mapping[str, Any] = row[2] if isinstance(row[2], Mapping) else {}
        texts_of, starts = answers.get("text"), answers.get("answer_start")
        if not texts_of or not starts or len(texts_of) != len(starts):
            return f"there are no answers with their positions in the text: {row[2]!r}"[:300]
    return ""


def _number(label: Any, first: int) -> int | None:
    try:
        return int(label) - first
    except (TypeError, ValueError):
        return None


def _tag(tag: Any, finetuning: Finetuning, origin: str) -> int:
    labels = finetuning.labels
    if isinstance(tag, str):
        named = "X" if tag == _UNNAMED_TAG and "X" in labels else tag
        if named in labels:
            return labels.index(named)
    elif isinstance(tag, int) and 0 <= tag < len(labels):
        return tag
    raise DataError(
        f"row {origin} of {finetuning.name} has the tag {tag!r}; expected one of "
        f"{', '.join(labels)}, or the position of a tag in this list, counted from 0"
    )


def _store(rows: list[Row], path: str) -> None:
    columns = {str(place): list(cells) for place, cells in enumerate(zip(*rows, strict=True))}
    write_atomic(path, parquet_bytes(pa.table(columns)))

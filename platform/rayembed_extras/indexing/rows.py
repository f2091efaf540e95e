"""Rows of documents on their way to the store: columns, types of metadata, and parts."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayembed.assets.arrow_files import read_sealed
from rayembed.assets.storage import join
from rayembed.data.engine.exchange import Sent
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.shuffle import bucket_of
from rayembed.data.engine.work_items import EXAMPLES_KEPT, Result
from rayembed.data.hashes import text_hash
from rayembed.errors import DataError
from rayembed_extras.indexing.layout import arrow_types
from rayembed_extras.indexing.settings import Documents

logger = logging.getLogger(__name__)

ROWS = pa.schema(
    [
        ("id", pa.string()),
        ("document", pa.string()),
        ("chunk", pa.int32()),
        ("text", pa.string()),
        ("text_hash", pa.int64()),
        ("metadata_hash", pa.int64()),
        ("origin", pa.string()),
    ]
)
"""Columns of a row on its way to the store, before its metadata."""

NO_METADATA = 0
"""Hash of a row's metadata where the index has none, and until the types of all files are known."""

DUPLICATE = "same text as another row"
"""Reason for leaving out a row whose id is its text's hash; it counts as no mistake."""


@dataclass(frozen=True)
class DocumentColumns:
    """Columns of the files that hold a document, with the names under which metadata is stored."""

    id: str | None
    """None: the id is the text's hash."""
    text: str
    metadata: Mapping[str, str]
    """Name in the store → column of the files."""

    @property
    def read(self) -> tuple[str, ...]:
        """All columns that are read."""
        first = (self.text,) if self.id is None else (self.id, self.text)
        return (*first, *self.metadata.values())


def metadata_types(
    columns: DocumentColumns,
    results: Sequence[Result],
    known: Mapping[str, str] | None = None,
    otherwise: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the type of each metadata column over all pieces, by its stored name.

    Integers become floats where floats stand beside them.

    Args:
        known: types of an earlier build, or of the settings, which values must fit.
        otherwise: types of columns without any value; those that it lacks have the type of texts.

    Raises:
        DataError: a column holds values of several types, or others than before.
    """
    found: dict[str, str] = {}
    for name, column in columns.metadata.items():
        kinds: dict[str, str] = {}
        for result in results:
            for kind, origin in result["types"].get(name, {}).items():
                kinds.setdefault(kind, origin)
        asked = set(kinds) | ({known[name]} if known and name in known else set())
        if asked == {"int64", "double"}:
            asked = {"double"} if not known or known.get(name) != "int64" else asked
        if len(asked) > 1:
            seen = [f"{kind} in {origin}" for kind, origin in kinds.items()]
            if known and name in known:
                seen.insert(0, f"{known[name]} in the index or in documents.metadata_types")
            raise DataError(
                f"documents.metadata: the column {column!r} holds values of several types: "
                f"{', '.join(seen)}; write all of them in one type, or leave the column out. An "
                "index keeps the types of its first build; those that a column will have later are "
                "set by documents.metadata_types"
            )
        found[name] = next(iter(asked), (otherwise or {}).get(name, "string"))
    return found


def warn_of_empty(
    columns: DocumentColumns, results: Sequence[Result], known: Collection[str]
) -> None:
    """Log a warning for each metadata column whose type no value and no setting gives."""
    for name, column in columns.metadata.items():
        if name not in known and not any(result["types"].get(name) for result in results):
            logger.warning(
                "documents.metadata: the column %r has no value, so it will hold texts; for "
                "another type, set documents.metadata_types before the index is built, as in "
                "documents.metadata_types={%s: int64}",
                column,
                column,
            )


def accept(documents: Documents, results: Sequence[Result]) -> tuple[int, dict[str, int]]:
    """Return the numbers of rows, and of rejected rows by reason.

    Raises:
        DataError: no document, or more rejected rows than allowed; the message has examples.
    """
    rows = sum(result["rows_in"] for result in results)
    used = sum(result["rows_used"] for result in results)
    rejected: Counter[str] = Counter()
    for result in results:
        rejected.update(result["rejected"])
    assert rows == used + sum(rejected.values()), (rows, used, rejected)
    counts = ", ".join(f"{count:,} × {reason}" for reason, count in sorted(rejected.items()))
    if not used:
        raise DataError(
            f"{documents.path!r} has no document in {rows:,} rows"
            f"{f': {counts}' if counts else ''}; check documents.path and documents.text"
        )
    bad = sum(rejected.values())
    if bad > documents.max_rejected_share * rows:
        examples = [example for result in results for example in result["examples"]]
        shown = "".join(f"\n  {one['reason']}: {one['row']}" for one in examples[:EXAMPLES_KEPT])
        raise DataError(
            f"{documents.path!r}: {bad:,} of {rows:,} rows have no usable document ({counts}), "
            f"more than documents.max_rejected_share={documents.max_rejected_share}; correct the "
            f"rows, or raise the share to leave them out{shown}"
        )
    return rows, dict(sorted(rejected.items()))


@dataclass(frozen=True)
class RowsFile:
    """Work item: a file of rows that `ReadIndexDocuments` wrote."""

    name: str

    @property
    def key(self) -> str:
        """Name of the file without its ending."""
        return self.name.removesuffix(".parquet")


@dataclass(frozen=True)
class SendToParts:
    """Task of an `exchange`: send the rows of a file to parts, by the hash of the document's id.

    Metadata are hashed here, in the types that the store has, so that a file with other types of
    the same values changes nothing.
    """

    folder: str
    parts: int
    types: Mapping[str, str]
    """Names of the metadata columns' types."""

    def __call__(self, item: RowsFile) -> Sent:
        """Read the file; return its rows with the part of each."""
        path = join(self.folder, item.name)
        rows = read_sealed(path, remedy=remedy(path)).cast(rows_schema(self.types))
        if self.types:
            place = rows.schema.get_field_index("metadata_hash")
            rows = rows.set_column(place, ROWS.field(place), _metadata_hashes(rows, self.types))
        parts = parts_of(rows["document"], self.parts)
        return Sent(rows, parts, {"rows_in": len(rows), "rows_out": len(rows), "rejected": {}})


def parts_of(documents: pa.ChunkedArray, parts: int) -> np.ndarray:
    """Return the part of each document by its id, (N,) int64."""
    return np.array([bucket_of(one, parts) for one in documents.to_pylist()], dtype=np.int64)


def _metadata_hashes(rows: pa.Table, names: Iterable[str]) -> pa.Array:
    """Hash the metadata of each row; times as numbers, whose zone has many names."""
    columns = []
    for name in names:
        column = rows[name]
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.int64())
        columns.append(column.to_pylist())
    return pa.array([text_hash(repr(list(one))) for one in zip(*columns, strict=True)], pa.int64())


def rows_schema(types: Mapping[str, str]) -> pa.Schema:
    """Schema of rows with metadata columns of these types."""
    return pa.schema([*ROWS, *(pa.field(name, kind) for name, kind in arrow_types(types).items())])

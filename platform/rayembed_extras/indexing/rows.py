"""Rows of documents on their way to the store: columns, types of metadata, and parts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayembed.assets.arrow_files import read_sealed
from rayembed.assets.storage import join
from rayembed.data.engine.exchange import Sent
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.shuffle import bucket_of
from rayembed.data.engine.work_items import EXAMPLES_KEPT, Result
from rayembed.errors import DataError
from rayembed_extras.indexing.layout import arrow_types
from rayembed_extras.indexing.settings import Documents

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
    columns: DocumentColumns, results: Sequence[Result], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the type of each metadata column over all pieces, by its stored name.

    A column without any value has the type of texts; integers become floats where floats stand
    beside them.

    Args:
        known: types of an earlier build, which values must fit.

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
            told = [f"{kind} in {origin}" for kind, origin in kinds.items()]
            if known and name in known:
                told.insert(0, f"{known[name]} in the index")
            raise DataError(
                f"documents.metadata: the column {column!r} holds values of several types: "
                f"{', '.join(told)}; write all of them in one type, or leave the column out"
            )
        found[name] = next(iter(asked), "string")
    return found


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
    """Task of an `exchange`: send the rows of a file to parts, by the hash of the document's id."""

    folder: str
    parts: int
    types: Mapping[str, str]
    """Names of the metadata columns' types."""

    def __call__(self, item: RowsFile) -> Sent:
        """Read the file; return its rows with the part of each."""
        path = join(self.folder, item.name)
        rows = read_sealed(path, remedy=remedy(path)).cast(rows_schema(self.types))
        documents = rows["document"].to_pylist()
        parts = np.array([bucket_of(one, self.parts) for one in documents], dtype=np.int64)
        return Sent(rows, parts, {"rows_in": len(rows), "rows_out": len(rows), "rejected": {}})


def rows_schema(types: Mapping[str, str]) -> pa.Schema:
    """Schema of rows with metadata columns of these types."""
    return pa.schema([*ROWS, *(pa.field(name, kind) for name, kind in arrow_types(types).items())])

"""Rows that cleaning removed, listed to be read: what each row was and what it was taken for.

folder/removed/*.parquet    the rows of `SCHEMA`; the folder reads as one table
"""

import pyarrow as pa

from rayembed.assets.storage import join, write_atomic
from rayembed.data.parts import parquet_bytes

NEAR_DUPLICATE = "near-duplicate"
OVERLAP = "text of a benchmark"

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("query", pa.string()),
        ("positive", pa.string()),  # the first
        ("origin", pa.list_(pa.string())),  # as of the record
        ("reason", pa.string()),
        ("matched", pa.string()),  # the other row's id, or the benchmark's task or file
        ("matched_text", pa.string()),
        ("similarity", pa.float32()),  # 1: equal
    ]
)

_SHOWN_CHARACTERS = 500


def shown(text: str) -> str:
    """The beginning of a text; a listing is to be read, and the source has the rest."""
    return text[:_SHOWN_CHARACTERS]


def write_removed(folder: str, name: str, rows: pa.Table) -> None:
    """Write removed rows as one file of the listing in the records' folder; none for no rows."""
    if len(rows):
        path = join(folder, "removed", f"{name}.parquet")
        write_atomic(path, parquet_bytes(rows.select(SCHEMA.names).cast(SCHEMA)))

"""Parts: Parquet files of records, named by their content and written atomically."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.array_files import save_arrays
from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.storage import file_name, join, with_ending, write_atomic
from rayembed.data.hashes import label_hash
from rayembed.data.records import Record

ROWS_PER_PART = 8192
"""Number of rows of a part, about 20 MB of text; parts of very large data sets have more."""

MANY_ROWS = 32 << 20
"""Number of rows from which parts grow; up to it there are at most 4,096 parts."""

MOST_GROWTH = 4
"""Largest factor by which parts grow: the vectors of one, 4,096 wide, take 268 MB."""

NEGATIVE = pa.struct(
    [
        ("text", pa.string()),
        ("rank", pa.int32()),  # place in the teacher's list; null: not mined
        ("score", pa.float32()),  # the teacher's cosine
        ("rule", pa.string()),  # what chose it: `given`, `top_k_perc_pos`, `other_class`, …
        ("teacher", pa.string()),  # fingerprint of the teacher's weights
        ("cross_score", pa.float32()),  # the cross-encoder's, where one rescored
    ]
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("query", pa.string()),
        ("positives", pa.list_(pa.string())),
        ("negatives", pa.list_(NEGATIVE)),
        ("dataset", pa.string()),
        ("task", pa.string()),
        ("query_instruction", pa.string()),
        ("document_instruction", pa.string()),
        ("in_batch", pa.bool_()),
        ("label", pa.string()),  # class; rows of one class are never each other's negatives
        ("positive_score", pa.float32()),  # of the first one, the teacher's, where mined
        ("language", pa.string()),  # code, where the source tells one
        ("origin", pa.list_(pa.string())),  # rows of the source: `file#row`, `file@byte`, …
        ("false_negatives", pa.list_(pa.int64())),  # hashes of documents that are no negatives
    ]
)
"""Parquet schema of records, read and written by every preparation step."""

OPTIONAL = pa.schema(
    [
        ("similarity", pa.float32()),  # of query and positive in [0, 1], where pairs are graded
        ("positive_cross_score", pa.float32()),  # the same by the cross-encoder, if one rescored
        (
            "positive_scores",
            pa.list_(pa.float32()),
        ),  # the teacher's of all, where there are several
        ("positive_cross_scores", pa.list_(pa.float32())),  # the same by the cross-encoder
        ("pair_rule", pa.string()),  # how a source with several ways made the pair
    ]
)
"""Optional columns, written only if a row of the file has a value."""

_FOLDER_OF_STEP = re.compile(r".*/(data/[^/]+|plans)/[^/]+(?=/)")


def rows_per_part(rows: int) -> int:
    """Choose the number of rows in each Parquet part from the number of all rows; larger data sets
    get larger parts, which keeps the number of files low.
    """
    growth = 1
    while growth < MOST_GROWTH and rows >= growth * MANY_ROWS:
        growth *= 2
    return growth * ROWS_PER_PART


@dataclass(frozen=True)
class Part:
    """One Parquet file of records and its number of rows."""

    path: str
    rows: int

    @property
    def name(self) -> str:
        """File name without its folder."""
        return file_name(self.path)

    @property
    def digest(self) -> str:
        """Content hash of the file, in hexadecimal digits."""
        return self.name.removeprefix("part-").removesuffix(".parquet")


@dataclass(frozen=True)
class PartItem:
    """Work item: one part, which is a Parquet file of records."""

    part: Part

    @property
    def key(self) -> str:
        """Content hash of the Parquet part, which identifies the work item."""
        return self.part.digest


def records_table(table: pa.Table) -> pa.Table:
    """Select and cast the columns that records have in files (`SCHEMA` and `OPTIONAL`)."""
    there = [field for field in OPTIONAL if field.name in table.column_names]
    schema = pa.schema([*SCHEMA, *there])
    return table.select(schema.names).cast(schema)


def table_of(records: Sequence[Record]) -> pa.Table:
    """Convert records to a table of `SCHEMA` and the `OPTIONAL` columns that have a value."""
    there = [f for f in OPTIONAL if any(getattr(r, f.name) is not None for r in records)]
    return pa.Table.from_pylist([r.to_row() for r in records], pa.schema([*SCHEMA, *there]))


def write_part(folder: str, records: Sequence[Record]) -> Part:
    """Write records as a Parquet file named by its content below `folder`; writing again has no
    effect.
    """
    return write_table(folder, table_of(records))


def write_table(folder: str, table: pa.Table) -> Part:
    """Write a table of records as a Parquet part below `folder`, and its index next to it."""
    content = parquet_bytes(table)
    path = join(folder, f"part-{xxhash.xxh3_128_hexdigest(content)}.parquet")
    # The index first: where a part is, its index is.
    save_arrays(
        index_path(path),
        id_hash=_hashes(table["id"]),
        query_hash=_hashes(table["query"]),
        num_negatives=pc.list_value_length(table["negatives"]).to_numpy().astype(np.int32),
        in_batch=table["in_batch"].to_numpy().astype(bool),
        language_hash=_hashes(table["language"]),
    )
    write_atomic(path, content)
    return Part(path, len(table))


def index_path(path: str) -> str:
    """Path of a Parquet part's index file, which has the columns of `index.PartIndex`."""
    return with_ending(path, ".index.npz")


def _hashes(column: pa.ChunkedArray) -> np.ndarray:
    """(rows,) int64 text hashes of a column; `NO_HASH` where a row has no text."""
    return np.array([label_hash(text) for text in column.to_pylist()], dtype=np.int64)


def read_table(path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read all or some columns of a Parquet part as an Arrow table.

    Raises:
        ArtifactError: the file is missing or broken.
        StorageError: the storage does not give it.
    """
    return read_sealed(path, columns, remedy=remedy(path))


def are_graded(parts: Sequence[Part]) -> bool:
    """Whether any record has a graded similarity, so that its positive may be dissimilar.

    Raises:
        ArtifactError: a part is missing or broken.
    """
    names = ["id", "similarity"]  # a column stands in a part only where a record has a value
    return any("similarity" in read_table(part.path, names).column_names for part in parts)


def remedy(path: str) -> str:
    """Return the advice for an error about a missing or broken file of a preparation step
    or plan.
    """
    found = _FOLDER_OF_STEP.match(path)
    folder = found.group() if found else path.rpartition("/")[0]
    return f"Remove the folder {folder!r} and start the job again, which repeats the step"


def read_records(path: str) -> list[Record]:
    """Read the records of a Parquet part, in its order."""
    return [Record.from_row(row) for row in read_table(path).to_pylist()]

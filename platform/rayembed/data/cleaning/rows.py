"""Row selection over parts: first of equal ids, random samples, rewriting without removed rows.

Removed rows are listed for review, each with the row or text that it matched:

    folder/removed/*.parquet    the rows of `SCHEMA`; the folder reads as one table
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.data.hashes import seeded_keys
from rayembed.data.parts import Part, read_table, write_table
from rayembed.data.plan.scratch import Runs
from rayembed.data.work_items import Result

DUPLICATE = "duplicate"
NOT_DRAWN = "not drawn (num_samples)"


_ROWS_AT_ONCE = 1 << 17

_RUN = np.dtype([("id", "<i8"), ("place", "<i8")])

BYTES_OF_A_ROW = 24
"""Bytes of scratch for each row: its hash, and what `first_of_each` sorts."""


def first_of_each(id_hash: np.ndarray, scratch: Path) -> np.ndarray:
    """(n,) bool mask of rows whose id occurs in no earlier row; the mask is all that is held.

    Args:
        id_hash: (n,) int64, which may be mapped.
        scratch: an empty folder.
    """
    runs = Runs(scratch, len(id_hash), _RUN)
    for first in range(0, len(id_hash), _ROWS_AT_ONCE):
        some = np.empty(min(_ROWS_AT_ONCE, len(id_hash) - first), _RUN)
        some["id"] = id_hash[first : first + len(some)]
        some["place"] = first + np.arange(len(some))
        runs.add(some)
    keep = np.zeros(len(id_hash), dtype=bool)
    for run in runs.read():
        keep[run["place"][np.unique(run["id"], return_index=True)[1]]] = True
    return keep


def drawn(id_hash: np.ndarray, keep: np.ndarray, num_samples: int | None, seed: int) -> np.ndarray:
    """(n,) bool mask of a sample of `num_samples` kept rows, drawn by a hash of seed and id.

    The sample is independent of the order of rows; all rows if there are no more.
    """
    left = int(keep.sum())
    if num_samples is None or left <= num_samples:
        return keep
    keys, at = np.empty(left, np.uint64), 0
    for first in range(0, len(keep), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        found = seeded_keys(id_hash[some][keep[some]], seed, "num_samples")
        keys[at : at + len(found)] = found
        at += len(found)
    last = np.partition(keys, num_samples - 1)[num_samples - 1]
    taken = keys < last
    # Of equal keys the first ones, as many as there is room for.
    taken[np.flatnonzero(keys == last)[: num_samples - int(taken.sum())]] = True
    chosen = keep.copy()
    chosen[keep] = taken
    return chosen


@dataclass(frozen=True)
class RowsOfPart:
    """Selected rows of a part, ascending."""

    part: Part
    packed: bytes
    """A bit for each row of the part."""
    first: int
    """Global position of the part's first row."""

    @property
    def rows(self) -> np.ndarray:
        """(n,) int64 row numbers within the part."""
        bits = np.frombuffer(self.packed, np.uint8)
        return np.flatnonzero(np.unpackbits(bits, count=self.part.rows))

    @property
    def key(self) -> str:
        """Unique name from part and rows."""
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(self.packed)}"


def rows_of_parts(parts: Sequence[Part], mask: np.ndarray) -> list[RowsOfPart]:
    """Split a global row mask by part; parts without selected rows are left out."""
    firsts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    return [
        RowsOfPart(part, np.packbits(mask[first:last]).tobytes(), first)
        for part, (first, last) in zip(parts, pairwise(firsts), strict=True)
        if mask[first:last].any()
    ]


@dataclass(frozen=True)
class KeepRows:
    """Task: rewrite a part with the kept rows only."""

    folder: str

    def __call__(self, item: RowsOfPart) -> Result:
        """Report `parts`; the caller counts removed rows."""
        table = read_table(item.part.path).take(pa.array(item.rows))
        part = write_table(self.folder, table)
        return {"parts": [[part.name, part.rows]]}


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
_EXAMPLES = 10
_EXAMPLES_OF_FILE = 3


@dataclass(frozen=True)
class RemovedRows:
    """Rows that a step removes."""

    positions: np.ndarray
    """(n,) int64 positions among all rows, ascending."""
    examples: list[dict[str, Any]]
    """Some of the listed rows, for the manifest."""


def shown(text: str) -> str:
    """Beginning of a text, enough to recognise it in a listing."""
    return text[:_SHOWN_CHARACTERS]


def write_removed(folder: str, name: str, rows: pa.Table) -> list[dict[str, Any]]:
    """Write all removed rows as one listing file; returns some of them.

    Args:
        folder: of the records.
        rows: of `SCHEMA`; no file is written for none.
    """
    if len(rows):
        path = join(folder, "removed", f"{name}.parquet")
        write_atomic(path, parquet_bytes(rows.select(SCHEMA.names).cast(SCHEMA)))
    return list(rows.slice(0, _EXAMPLES_OF_FILE).to_pylist())


def some(examples: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The first examples, up to the number that a manifest shows for each reason."""
    return list(islice(chain.from_iterable(examples), _EXAMPLES))

"""Row selection over parts: first of equal ids, random samples, rewriting without removed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.data.hashes import seeded_keys
from rayembed.data.parts import Part, read_table, write_table
from rayembed.data.work_items import Result

DUPLICATE = "duplicate"
NOT_DRAWN = "not drawn (num_samples)"


def first_of_each(id_hash: np.ndarray) -> np.ndarray:
    """(n,) bool mask of rows whose id occurs in no earlier row."""
    keep = np.zeros(len(id_hash), dtype=bool)
    keep[np.unique(id_hash, return_index=True)[1]] = True
    return keep


def drawn(id_hash: np.ndarray, keep: np.ndarray, num_samples: int | None, seed: int) -> np.ndarray:
    """(n,) bool mask of a sample of `num_samples` kept rows, drawn by a hash of seed and id.

    The sample is independent of the order of rows; all rows if there are no more.
    """
    left = np.flatnonzero(keep)
    if num_samples is None or len(left) <= num_samples:
        return keep
    order = np.argsort(seeded_keys(id_hash[left], seed, "num_samples"), kind="stable")
    chosen = np.zeros_like(keep)
    chosen[left[order[:num_samples]]] = True
    return chosen


@dataclass(frozen=True)
class RowsOfPart:
    """Selected rows of a part, ascending."""

    part: Part
    rows: np.ndarray
    """(n,) int64 row numbers within the part."""
    first: int = 0
    """Global position of the part's first row."""

    @property
    def key(self) -> str:
        """Unique name from part and rows."""
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(self.rows.tobytes())}"


def rows_of_parts(parts: Sequence[Part], mask: np.ndarray) -> list[RowsOfPart]:
    """Split a global row mask by part; parts without selected rows are left out."""
    firsts = np.cumsum([0, *(part.rows for part in parts)])
    marked = [np.flatnonzero(some) for some in np.split(mask, firsts[1:-1])]
    return [
        RowsOfPart(part, rows, int(first))
        for part, rows, first in zip(parts, marked, firsts[:-1], strict=True)
        if len(rows)
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

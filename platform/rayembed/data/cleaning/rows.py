"""Rows of parts that stay: exact duplicates told, samples drawn, parts written without the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.data.hashes import seeded_keys
from rayembed.data.parts import Part, read_table, write_table
from rayembed.data.units import Result

DUPLICATE = "duplicate"
NOT_DRAWN = "not drawn (num_samples)"


def first_of_each(id_hash: np.ndarray) -> np.ndarray:
    """(n,) bool: no earlier row has the same id."""
    keep = np.zeros(len(id_hash), dtype=bool)
    keep[np.unique(id_hash, return_index=True)[1]] = True
    return keep


def drawn(id_hash: np.ndarray, keep: np.ndarray, num_samples: int | None, seed: int) -> np.ndarray:
    """(n,) bool: the `num_samples` of the rows to keep that are smallest by a hash of seed and id.

    Which ones depends on no order of the rows; all where there are no more.
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
    """Rows of a part, in its order."""

    part: Part
    rows: np.ndarray
    """(n,) int64 within the part."""
    first: int = 0
    """Position of the part's first row among all rows."""

    @property
    def key(self) -> str:
        """Names the unit by part and rows."""
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(self.rows.tobytes())}"


def rows_of_parts(parts: Sequence[Part], mask: np.ndarray) -> list[RowsOfPart]:
    """The rows of each part that a mask over all rows marks; parts without any are left out."""
    firsts = np.cumsum([0, *(part.rows for part in parts)])
    marked = [np.flatnonzero(some) for some in np.split(mask, firsts[1:-1])]
    return [
        RowsOfPart(part, rows, int(first))
        for part, rows, first in zip(parts, marked, firsts[:-1], strict=True)
        if len(rows)
    ]


@dataclass(frozen=True)
class KeepRows:
    """Task: a part of the rows that stay."""

    folder: str

    def __call__(self, unit: RowsOfPart) -> Result:
        """`parts`; rows that go are counted by who chose them."""
        table = read_table(unit.part.path).take(pa.array(unit.rows))
        part = write_table(self.folder, table)
        return {"parts": [[part.name, part.rows]]}

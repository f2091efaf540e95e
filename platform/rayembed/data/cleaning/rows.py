"""Select rows over all Parquet parts (first of equal ids, random samples), and rewrite parts
without the removed rows.

Removed rows are listed for review, each with the row or text that it matched:

    folder/removed/*.parquet    the rows of `SCHEMA`; the folder reads as one table
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.data.engine.parts import Part, read_table, write_table
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import nth_smallest, seeded_keys
from rayembed.data.plan.scratch import Runs, num_runs, run_of_hash

DUPLICATE = "duplicate"
NOT_DRAWN = "not drawn (num_samples)"


_ROWS_AT_ONCE = 1 << 17

_RUN = np.dtype([("id", "<i8"), ("place", "<i8")])

BYTES_OF_A_ROW = 24
"""Bytes of scratch for each row: its hash, and what `first_of_each` sorts."""


def first_of_each(id_hash: np.ndarray, scratch: Path) -> np.ndarray:
    """(n,) bool mask of rows whose id occurs in no earlier row; only the mask is kept in
    memory.

    Args:
        id_hash: (n,) int64, which may be mapped.
        scratch: an empty folder.
    """
    runs = Runs(scratch, num_runs(len(id_hash)), _RUN)
    for first in range(0, len(id_hash), _ROWS_AT_ONCE):
        some = np.empty(min(_ROWS_AT_ONCE, len(id_hash) - first), _RUN)
        some["id"] = id_hash[first : first + len(some)]
        some["place"] = first + np.arange(len(some))
        runs.add(some, run_of_hash(some["id"], runs.count))
    keep = np.zeros(len(id_hash), dtype=bool)
    for run in runs.read():
        keep[run["place"][np.unique(run["id"], return_index=True)[1]]] = True
    return keep


def averaged(parts: Sequence[Part], id_hash: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Compute the mean score of each graded pair that occurs in several rows with different
    scores.

    Args:
        id_hash: (n,) int64: rows of one hash are one pair.
        keep: (n,) bool: one row of each pair.

    Returns:
        (m,) `SCORE` array, ascending by row.
    """
    scores = np.full(len(id_hash), np.nan)
    first = 0
    for part in parts:
        column = pc.cast(read_table(part.path, ["id", "similarity"])["similarity"], pa.float64())
        scores[first : first + part.rows] = column.to_numpy()
        first += part.rows
    order = np.lexsort((scores, id_hash))  # by score, so that sums do not depend on the order
    starts = np.flatnonzero(np.diff(id_hash[order], prepend=np.nan) != 0)
    rows = np.diff(starts, append=len(order))
    means = np.add.reduceat(scores[order], starts) / rows
    of_pair = np.repeat(np.arange(len(starts)), rows)
    differ = (scores[order][starts] != scores[order][starts + rows - 1])[of_pair]
    chosen = differ & keep[order]
    found = np.empty(int(chosen.sum()), SCORE)
    found["row"], found["score"] = order[chosen], means[of_pair[chosen]]
    return np.sort(found, order="row")


def drawn(id_hash: np.ndarray, keep: np.ndarray, num_samples: int | None, seed: int) -> np.ndarray:
    """(n,) bool mask of a sample of `num_samples` kept rows, drawn by a hash of seed and
    id.

    The sample is independent of the order of rows; all rows if there are no more.

    Args:
        id_hash: (n,) int64, which differ among the kept rows.
        keep: (n,) bool.
    """
    left = int(keep.sum())
    if num_samples is None or left <= num_samples:
        return keep

    def keys_of(rows: slice) -> np.ndarray:
        return seeded_keys(id_hash[rows][keep[rows]], seed, "num_samples")

    cuts = [slice(n, n + _ROWS_AT_ONCE) for n in range(0, len(keep), _ROWS_AT_ONCE)]
    last = np.uint64(nth_smallest(lambda: map(keys_of, cuts), num_samples))
    chosen = keep.copy()
    for some in cuts:
        rows = some.start + np.flatnonzero(keep[some])
        chosen[rows[keys_of(some) > last]] = False
    return chosen


SCORE = np.dtype([("row", "<i8"), ("score", "<f4")])
"""Row number and the new similarity of its pair."""

NO_SCORES: np.ndarray = np.empty(0, SCORE)

_NO_NEGATIVES: np.ndarray = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class RowsOfPart:
    """Work item: the selected rows of a Parquet part, with the changes to make in them."""

    part: Part
    packed: bytes
    """A bit for each row of the part."""
    first: int
    """Global position of the part's first row."""
    negatives: np.ndarray = field(default_factory=lambda: _NO_NEGATIVES)
    """(m, 2) int64 row number within the part, and index of a negative to remove from it."""
    scores: np.ndarray = field(default_factory=lambda: NO_SCORES)
    """(s,) `SCORE` of rows within the part whose score changes."""

    @property
    def rows(self) -> np.ndarray:
        """(n,) int64 row numbers within the part."""
        bits = np.frombuffer(self.packed, np.uint8)
        return np.flatnonzero(np.unpackbits(bits, count=self.part.rows))

    @property
    def key(self) -> str:
        """Unique name of the work item, from the part, its rows and the changes to them."""
        named = self.packed + self.negatives.tobytes() + self.scores.tobytes()
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(named)}"


def rows_of_parts(
    parts: Sequence[Part],
    mask: np.ndarray,
    negatives: np.ndarray = _NO_NEGATIVES,
    scores: np.ndarray = NO_SCORES,
) -> list[RowsOfPart]:
    """Split a mask over all rows into one work item for each part that has selected rows.

    Args:
        negatives: (m, 2) int64 global position of a row, ascending, and place of a negative that
            is removed from it.
        scores: (s,) `SCORE` by global position, ascending.
    """
    firsts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    edges = np.searchsorted(negatives[:, 0], firsts).tolist()
    graded = np.searchsorted(scores["row"], firsts).tolist()
    found = []
    for part, (first, last), (start, stop), some in zip(
        parts, pairwise(firsts), pairwise(edges), pairwise(graded), strict=True
    ):
        if mask[first:last].any():
            packed = np.packbits(mask[first:last]).tobytes()
            gone = negatives[start:stop] - np.array([first, 0])
            of_part = scores[slice(*some)].copy()
            of_part["row"] -= first
            found.append(RowsOfPart(part, packed, first, gone, of_part))
    return found


@dataclass(frozen=True)
class KeepRows:
    """Task: rewrite a Parquet part with the kept rows only, dropping removed negatives and
    replacing averaged scores.
    """

    folder: str

    def __call__(self, item: RowsOfPart) -> Result:
        """Rewrite the part and return its name and row count as `parts`; the caller counts removed
        rows.
        """
        table = read_table(item.part.path)
        if len(item.negatives):
            place = table.schema.get_field_index("negatives")
            left = without(table["negatives"].combine_chunks(), item.negatives)
            table = table.set_column(place, table.schema.field(place), left)
        if len(item.scores):
            place = table.schema.get_field_index("similarity")
            similarity = table["similarity"].to_numpy().copy()
            similarity[item.scores["row"]] = item.scores["score"]
            field_ = table.schema.field(place)
            table = table.set_column(place, field_, pa.array(similarity, field_.type))
        table = table.take(pa.array(item.rows))
        part = write_table(self.folder, table)
        return {"parts": [[part.name, part.rows]]}


def without(lists: pa.ListArray, gone: np.ndarray) -> pa.ListArray:
    """Copy an array of Arrow lists without the given elements of these lists.

    Args:
        lists: n lists, or nulls for none.
        gone: (m, 2) int64 number of a list, and place of an element in it.
    """
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    starts = np.cumsum(counts) - counts
    stays = np.ones(int(counts.sum()), dtype=bool)
    stays[starts[gone[:, 0]] + gone[:, 1]] = False
    counts -= np.bincount(gone[:, 0], minlength=len(counts))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, lists.flatten().filter(pa.array(stays)))


OVERLAP = "text of a benchmark"
CONTAINED = "contains a text of a benchmark"

_WHY = [
    ("reason", pa.string()),
    ("matched", pa.string()),  # the other row's id, or the benchmark's task or file
    ("matched_text", pa.string()),
    ("similarity", pa.float32()),  # 1: equal, or contained as a whole
]

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("query", pa.string()),
        ("positive", pa.string()),  # the first
        ("origin", pa.list_(pa.string())),  # as of the record
        *_WHY,
    ]
)

SCHEMA_OF_DOCUMENTS = pa.schema([("document", pa.string()), *_WHY])
"""Columns of the listing of documents that are excluded from mining; a folder has a listing of one
kind."""

_SHOWN_CHARACTERS = 500
_EXAMPLES = 10
_EXAMPLES_OF_FILE = 3


@dataclass(frozen=True)
class RemovedRows:
    """Positions of the rows that a cleaning step removes, and examples of them."""

    positions: np.ndarray
    """(n,) int64 positions among all rows, ascending."""
    examples: list[dict[str, Any]]
    """Examples from the listing, for the manifest."""


def shown(text: str) -> str:
    """Return the beginning of a text, long enough to recognise the text in a listing."""
    return text[:_SHOWN_CHARACTERS]


def write_removed(
    folder: str, name: str, rows: pa.Table, schema: pa.Schema = SCHEMA
) -> list[dict[str, Any]]:
    """Write all removed rows as one listing file, and return a few of them as examples.

    Args:
        folder: of the records.
        rows: of `schema`; no file is written for none.
    """
    if len(rows):
        path = join(folder, "removed", f"{name}.parquet")
        write_atomic(path, parquet_bytes(rows.select(schema.names).cast(schema)))
    return list(rows.slice(0, _EXAMPLES_OF_FILE).to_pylist())


def some(examples: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the first examples of all results, limited to the number that a manifest shows for
    each reason.
    """
    return list(islice(chain.from_iterable(examples), _EXAMPLES))

"""Cut clusters into batches of equal size, with the rows sorted on this machine's disk (arXiv
2410.02525, section 4.1).

Rows are sorted in runs of neighbouring clusters, and what stands in memory grows with the clusters
and the batches, and not with the rows. n rows, k clusters, G pairs of a batch.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayembed.data.plan.scratch import Runs, mapped, num_runs

BYTES_OF_A_ROW = 32
"""Bytes of scratch that packing takes for each row."""

_ROWS_AT_ONCE = 1 << 17

_RUN = np.dtype([("place", "<i8"), ("key", "<u8"), ("row", "<i8")])


@dataclass(frozen=True)
class Batches:
    """Batches of rows of similar clusters, stored as positions in the list of rows sorted by
    cluster.
    """

    rows: np.ndarray
    """(n,) int64 row numbers, sorted by the place of their cluster on the tour and by key; mapped.
    """
    pairs: int
    """Number G of pairs in a batch."""
    rest_before: np.ndarray
    """(k,) int64 number of leftover rows before those of each cluster on the tour; a leftover row
    fills no batch of its own cluster."""
    rest_place: np.ndarray
    """(k,) int64 position of each cluster's first leftover row."""
    whole_first: np.ndarray
    """(whole batches,) int64 position of each batch's first row."""
    order: np.ndarray
    """(batches,) int64 batches along the tour: those of whole clusters come first in number, then
    those of remainders."""

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.order)

    @property
    def size(self) -> int:
        """Number of rows in all batches."""
        return len(self.order) * self.pairs

    def read(self) -> Iterator[np.ndarray]:
        """Yield (batches, G) int64 row numbers of consecutive batches, several batches at a
        time.
        """
        many, within = max(1, _ROWS_AT_ONCE // self.pairs), np.arange(self.pairs)
        for start in range(0, len(self), many):
            number = self.order[start : start + many]
            is_whole = number < len(self.whole_first)
            places = np.empty((len(number), self.pairs), np.int64)
            places[is_whole] = self.whole_first[number[is_whole], None] + within
            rest = (number[~is_whole] - len(self.whole_first)) * self.pairs
            rows = rest[:, None] + within
            places[~is_whole] = _of_rest(rows, self.rest_before, self.rest_place)
            yield self.rows[places]


def _of_rest(number: np.ndarray, before: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return the positions, in the list of rows sorted by cluster, of leftover rows that are given
    by their numbers among all leftovers.
    """
    cluster = np.searchsorted(before, number, side="right") - 1
    found: np.ndarray = place[cluster] + (number - before[cluster])
    return found


def pack_on_disk(
    scratch: Path,
    cluster: np.ndarray,
    keys: Iterator[np.ndarray],
    tour: np.ndarray,
    batch_pairs: int,
) -> Batches:
    """Cut the rows into batches, cluster after cluster in the order of `tour`.

    A cluster that fills whole batches gives them, and its remainder is joined with the remainders
    of its neighbours on the tour, which are cut into batches together. Rows at the end of the tour
    that do not fill a batch are dropped.

    Args:
        scratch: an existing folder with `BYTES_OF_A_ROW` bytes for each row; the batches are read
            from there.
        cluster: (n,) number of each row's cluster; may be mapped.
        keys: (some,) uint64 by which rows of a cluster are ordered, of one row after the other;
            equal ones by row number.
        tour: the clusters that have rows, each once, and any others.
        batch_pairs: G.
    """
    place_of = np.empty(int(tour.max(initial=-1)) + 1, dtype=np.int64)
    place_of[tour] = np.arange(len(tour))
    sizes = np.zeros(len(place_of), np.int64)
    for start in range(0, len(cluster), _ROWS_AT_ONCE):
        sizes += np.bincount(cluster[start : start + _ROWS_AT_ONCE], minlength=len(sizes))
    sizes = sizes[tour]
    first = sizes.cumsum() - sizes
    rows = _sorted(scratch, cluster, keys, place_of, first)
    whole = sizes // batch_pairs * batch_pairs
    rest = sizes - whole
    counts = whole // batch_pairs
    before = np.repeat(counts.cumsum() - counts, counts)
    whole_first = np.repeat(first, counts) + (np.arange(counts.sum()) - before) * batch_pairs
    rest_before, rest_place = rest.cumsum() - rest, first + whole
    numbers = np.arange(rest.sum() // batch_pairs) * batch_pairs
    begins = np.concatenate([whole_first, _of_rest(numbers, rest_before, rest_place)])
    order = np.argsort(begins, kind="stable")
    return Batches(rows, batch_pairs, rest_before, rest_place, whole_first, order)


def _sorted(
    scratch: Path,
    cluster: np.ndarray,
    keys: Iterator[np.ndarray],
    place_of: np.ndarray,
    first: np.ndarray,
) -> np.ndarray:
    """(n,) int64 row numbers in a memory-mapped file, sorted by the cluster's place in the order
    and then by key.
    """
    runs = Runs(scratch, num_runs(len(cluster)), _RUN)
    # All rows of a cluster are in one run.
    run_of = np.minimum(first * runs.count // max(1, len(cluster)), runs.count - 1)
    start = 0
    for some in keys:
        found = np.empty(len(some), _RUN)
        found["place"] = place_of[cluster[start : start + len(some)]]
        found["key"], found["row"] = some, start + np.arange(len(some))
        runs.add(found, run_of[found["place"]])
        start += len(some)
    rows, at = mapped(scratch / "rows", len(cluster), np.int64), 0
    for found in runs.read():
        rows[at : at + len(found)] = found["row"][np.lexsort((found["key"], found["place"]))]
        at += len(found)
    return rows


def pack(cluster: np.ndarray, keys: np.ndarray, tour: np.ndarray, batch_pairs: int) -> np.ndarray:
    """(batches, G) int64 row numbers of the batches that `pack_on_disk` makes, for rows that fit in
    memory.

    Args:
        keys: (n,) by which rows of a cluster are ordered.
    """
    with tempfile.TemporaryDirectory() as folder:
        batches = pack_on_disk(Path(folder), cluster, iter([keys]), tour, batch_pairs)
        return np.concatenate([np.empty((0, batch_pairs), np.int64), *batches.read()])

"""Rows of a data set in the order that drawing needs, on the disk of this machine.

Sorted in runs that fit in memory, as a data set's index may not: rows are cut by the first bits of
their id's hash into as many files as it takes, and each is sorted by itself. 12 bytes a row stay in
files that are mapped into memory, so that the system holds of them what there is room for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayembed.data.engine.index import PartIndex
from rayembed.data.plan.scratch import Runs, mapped, num_runs, run_of_hash

_RUN = np.dtype([("id", "<i8"), ("query", "<i8"), ("language", "<i8"), ("place", "<i8")])


@dataclass(frozen=True)
class SortedRows:
    """Rows by language, and within a language by the hash of their id; equal ones by place."""

    place: np.ndarray
    """(n,) int64 or int32 global row numbers, counted through the parts; mapped."""
    query_hash: np.ndarray
    """(n,) int64 hash of the queries' texts; mapped."""
    rows_of: Mapping[int, int]
    """Language hash → number of its rows, ascending."""


def sorted_rows(
    scratch: Path,
    chunks: Iterator[tuple[PartIndex, np.ndarray, np.ndarray]],
    num_rows: int,
    kept: Callable[[], Mapping[int, int]],
) -> SortedRows:
    """Sort rows within bounded memory; 44 bytes a row of `scratch` are used on the way.

    Args:
        scratch: an empty folder.
        chunks: index of some rows, mask of those to sort and (rows,) int64 by what they are grouped
            first, in the order of the places.
        num_rows: of all chunks.
        kept: called after the last chunk: groups that stay and the rows of each.
    """
    runs = Runs(scratch, num_runs(num_rows), _RUN)
    first = 0
    for index, mask, group in chunks:
        chosen = np.flatnonzero(mask)
        rows = np.empty(len(chosen), _RUN)
        rows["id"], rows["query"] = index.id_hash[chosen], index.query_hash[chosen]
        rows["language"], rows["place"] = group[chosen], first + chosen
        runs.add(rows, run_of_hash(rows["id"], runs.count))
        first += len(mask)
    rows_of = dict(sorted(kept().items()))
    total = sum(rows_of.values())
    small = np.int32 if num_rows < 2**31 else np.int64
    place = mapped(scratch / "place", total, small)
    query = mapped(scratch / "query", total, np.int64)
    languages = np.array(list(rows_of), np.int64)
    sizes = np.array(list(rows_of.values()), np.int64)
    ends = np.cumsum(sizes) - sizes
    for run in runs.read():
        group = np.searchsorted(languages, run["language"])
        stays = np.flatnonzero(np.isin(run["language"], languages))
        # Rows of a run are in the order of their places, which a stable sort keeps.
        order = stays[np.lexsort((run["id"][stays], group[stays]))]
        rows, group = run[order], group[order]
        counts = np.bincount(group, minlength=len(languages))
        starts = np.cumsum(counts) - counts
        to = ends[group] + np.arange(len(rows)) - starts[group]
        place[to], query[to] = rows["place"], rows["query"]
        ends += counts
    return SortedRows(place, query, rows_of)

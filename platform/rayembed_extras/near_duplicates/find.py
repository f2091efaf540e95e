"""Find near-duplicate rows: MinHash proposes pairs, the exact Jaccard similarity of n-grams
decides.

Tasks, each bounded in memory by a part or a bucket:

    signatures   the bands of each part's signatures, sent to their bucket
    buckets      pairs of rows that share a band
    pairs        each pair sent to the task that compares it, once
    rows         which task wants which rows, sent to their parts
    candidates   the n-grams of these rows, sent to the task
    compare      pairs whose exact Jaccard similarity reaches the threshold
    list         what is removed and for which other row

This process holds the rows that go; similar pairs pass through it. They are the edges of a graph;
of each of its components the row stays whose id has the lowest hash. So the outcome depends neither
on the number of parts nor on the rows' order.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayembed.assets.storage import join
from rayembed.data.cleaning.rows import RemovedRows, rows_of_parts, some
from rayembed.data.engine.artifacts import ArtifactWriter
from rayembed.data.engine.exchange import exchange
from rayembed.data.engine.parts import Part
from rayembed.data.engine.shuffle import Bucket
from rayembed.data.engine.work_items import Execute, run_resumable
from rayembed.data.plan.scratch import mapped, scratch_folder
from rayembed_extras.near_duplicates.settings import NearDuplicates
from rayembed_extras.near_duplicates.signatures import BandPart, PairsOfBucket, SendPairs, bands
from rayembed_extras.near_duplicates.verified import (
    CandidatePart,
    ComparePairs,
    ListRemoved,
    RemovedPairs,
    SendCandidates,
    SendTexts,
    read_similar,
)

BYTES_OF_A_ROW = 32
"""Scratch bytes for each row of the data set, if every row is similar to another."""


class SimilarPairs(NamedTuple):
    """Some of the similar pairs of rows, in the order in which one comparison task lists them."""

    task: int
    pairs: np.ndarray
    """(m, 2) int64 positions."""
    similarity: np.ndarray
    """(m,) float32."""


class Removed(NamedTuple):
    """Removed rows in ascending order, each with the row that it resembles most."""

    positions: np.ndarray
    """(n,) int64."""
    task: np.ndarray
    """(n,) int32 task that compared the pair."""
    pair: np.ndarray
    """(n,) int32 index of the pair among the task's similar pairs."""
    side: np.ndarray
    """(n,) int8 side of the row in the pair."""


def removed_rows(
    chunks: Callable[[], Iterator[SimilarPairs]], id_hash: np.ndarray, scratch: Path
) -> Removed:
    """Remove all rows except one of each connected component of similar pairs; return them with
    their nearest row.

    The row of the lowest id hash stays. Of equally similar rows the one of the lowest id hash is
    reported.

    Args:
        chunks: gives all similar pairs, each time that it is called.
        id_hash: (rows,) int64.
        scratch: an empty folder.
    """
    rows = len(id_hash)
    small = np.int32 if rows < 2**31 else np.int64
    # As distances, so that zeros, which take no room, say that a row is by itself.
    above = mapped(scratch / "above", rows, small)
    for chunk in chunks():
        _join(above, chunk.pairs, id_hash)
    goes = mapped(scratch / "goes", rows, np.bool_)
    similarity = mapped(scratch / "similarity", rows, np.float32)
    other = mapped(scratch / "other", rows, small)
    task = mapped(scratch / "task", rows, np.int32)
    pair = mapped(scratch / "pair", rows, np.int32)
    side = mapped(scratch / "side", rows, np.int8)
    for chunk in chunks():
        row, beside = chunk.pairs.T.ravel(), chunk.pairs.T[::-1].ravel()
        number = np.tile(np.arange(len(chunk.pairs)), 2)
        alike = chunk.similarity[number]
        order = np.lexsort((beside, id_hash[beside], -alike, row))
        order = order[np.diff(row[order], prepend=-1) != 0]
        order = order[_roots(above, row[order]) != row[order]]
        here, there = row[order], beside[order]
        known, ids = other[here], id_hash[there]
        # Equal ones are ordered by (id hash, position), as within a chunk.
        nearer = (alike[order] > similarity[here]) | (
            (alike[order] == similarity[here])
            & ((ids < id_hash[known]) | ((ids == id_hash[known]) & (there < known)))
        )
        order, here = order[nearer | ~goes[here]], here[nearer | ~goes[here]]
        goes[here], similarity[here], other[here] = True, alike[order], beside[order]
        task[here], pair[here] = chunk.task, number[order]
        side[here] = order // max(len(chunk.pairs), 1)
    positions = np.flatnonzero(goes)
    return Removed(positions, task[positions], pair[positions], side[positions])


def _join(above: np.ndarray, pairs: np.ndarray, id_hash: np.ndarray) -> None:
    """Unite the components of the rows of each pair (union-find), many pairs at a time.

    The root of a component is its row of the lowest id hash.
    """
    first, second = pairs[:, 0], pairs[:, 1]
    while len(first):
        roots = np.stack([_roots(above, first), _roots(above, second)])
        apart = roots[0] != roots[1]
        first, second, roots = first[apart], second[apart], roots[:, apart]
        low, high = np.take_along_axis(roots, np.lexsort((roots, id_hash[roots]), axis=0), 0)
        # A root that several pairs would hang elsewhere goes to one of them; the others come again.
        above[high] = high - low


def _roots(above: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(m,) int64 root of each row's component; shortens the path so that each row points to its
    root.
    """
    root = rows - above[rows]
    while True:
        higher = root - above[root]
        if np.array_equal(higher, root):
            break
        root = higher
    above[rows] = rows - root
    return np.asarray(root, np.int64)


log = logging.getLogger(__name__)

_BANDS_PER_BUCKET = 1 << 22
"""Bands in one bucket: 24 bytes each in the file, a few hundred bytes while sorting."""

PAIRS_COMPARED = 32_768
"""Approximate number of pairs that one task compares."""


def find_near_duplicates(
    config: NearDuplicates,
    writer: ArtifactWriter,
    parts: Sequence[Part],
    keep: np.ndarray,
    id_hash: np.ndarray,
    execute: Execute,
) -> RemovedRows:
    """Find near-duplicate rows and list them.

    Args:
        writer: its folder keeps the listing, its `working_folder` what only the next task reads
            and the results of the tasks that write it.
        keep: (rows,) bool of the rows to look at.
        id_hash: (rows,) int64 of the rows' ids, by which the one that stays is chosen.

    Raises:
        StorageFullError: this machine has too little scratch for the rows.
    """
    name, folder = writer.dataset, writer.folder
    scratch = join(writer.working_folder, "near-duplicates")
    tasks = _compared(scratch, name, config, parts, keep, execute)

    def similar() -> Iterator[SimilarPairs]:
        for number in range(tasks):
            yield SimilarPairs(number, *read_similar(scratch, number))

    size = BYTES_OF_A_ROW * len(id_hash)
    with scratch_folder(f"the near-duplicates of data set {name!r}", size) as local:
        removed = removed_rows(similar, id_hash, local)
    log.info("near-duplicates of data set %s: %d rows removed", name, len(removed.positions))
    listing = ListRemoved(folder, scratch)
    shown = run_resumable(folder, f"list {name}", listing, _listed(removed), execute)
    return RemovedRows(removed.positions, some(result["examples"] for result in shown))


def _compared(
    scratch: str,
    name: str,
    config: NearDuplicates,
    parts: Sequence[Part],
    keep: np.ndarray,
    execute: Execute,
) -> int:
    """Compare all rows that share a MinHash band; return the number of comparison tasks."""
    items = rows_of_parts(parts, keep)
    count = max(1, -(-int(keep.sum()) * bands(config)[0] // _BANDS_PER_BUCKET))
    signatures = BandPart(config, count)
    sent, _ = exchange(scratch, f"signatures {name}", signatures, items, count, execute)
    buckets = [Bucket(number) for number in range(count)]
    find = PairsOfBucket(scratch, sent)
    results = run_resumable(scratch, f"buckets {name}", find, buckets, execute)
    found = sum(int(result["pairs"]) for result in results)  # some of them in several buckets
    tasks = -(-found // PAIRS_COMPARED)
    if not tasks:
        return 0
    send = SendPairs(scratch, tasks)
    pairs, _ = exchange(scratch, f"pairs {name}", send, buckets, tasks, execute)
    compared = [Bucket(number) for number in range(tasks)]
    firsts = np.cumsum([0, *(part.rows for part in parts)])
    ask = SendTexts(scratch, pairs, firsts[:-1])
    rows, _ = exchange(scratch, f"rows {name}", ask, compared, len(parts), execute)
    of_parts = [
        CandidatePart(part, number, int(firsts[number])) for number, part in enumerate(parts)
    ]
    grams = SendCandidates(config, rows)
    candidates, _ = exchange(scratch, f"candidates {name}", grams, of_parts, tasks, execute)
    compare = ComparePairs(scratch, config.threshold, candidates)
    results = run_resumable(scratch, f"compare {name}", compare, compared, execute)
    log.info(
        "near-duplicates of data set %s: %d pairs of rows compared, %d of them similar",
        *(name, sum(r["pairs"] for r in results), sum(r["similar"] for r in results)),
    )
    return tasks


def _listed(removed: Removed) -> list[RemovedPairs]:
    """Make work items that list removed rows, each with the similar pair for which it is
    removed.
    """
    order = np.argsort(removed.task, kind="stable")
    edges = np.flatnonzero(np.diff(removed.task[order], prepend=-1))
    return [
        RemovedPairs(int(removed.task[mine[0]]), removed.pair[mine], removed.side[mine])
        for mine in np.split(order, edges)[1:]
    ]

"""Near-duplicate removal: MinHash proposes pairs, the exact Jaccard similarity of n-grams decides.

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
from collections.abc import Iterator, Sequence

import numpy as np

from rayembed.assets.storage import join
from rayembed.config.mining import NearDuplicates
from rayembed.data.cleaning.components import (
    BYTES_OF_A_ROW,
    Removed,
    SimilarPairs,
    removed_rows,
)
from rayembed.data.cleaning.rows import RemovedRows, rows_of_parts, some
from rayembed.data.cleaning.signatures import BandPart, PairsOfBucket, SendPairs, bands
from rayembed.data.cleaning.verified import (
    CandidatePart,
    ComparePairs,
    ListRemoved,
    RemovedPairs,
    SendCandidates,
    SendRows,
    read_similar,
)
from rayembed.data.engine.exchange import exchange
from rayembed.data.engine.parts import Part
from rayembed.data.engine.shuffle import Bucket
from rayembed.data.engine.work_items import Execute, run_resumable
from rayembed.data.plan.scratch import scratch_folder

log = logging.getLogger(__name__)

_BANDS_PER_BUCKET = 1 << 22
"""Bands in one bucket: 24 bytes each in the file, a few hundred bytes while sorting."""

PAIRS_COMPARED = 32_768
"""Pairs that one task compares, about."""


def find_near_duplicates(
    folder: str,
    working: str,
    name: str,
    config: NearDuplicates,
    parts: Sequence[Part],
    keep: np.ndarray,
    id_hash: np.ndarray,
    execute: Execute,
) -> RemovedRows:
    """Find near-duplicate rows and list them.

    Args:
        folder: keeps the listing.
        working: keeps what only the next task reads, and the results of the tasks that write it.
        name: of the data set, for the log.
        keep: (rows,) bool of the rows to look at.
        id_hash: (rows,) int64 of the rows' ids, by which the one that stays is chosen.

    Raises:
        StorageFullError: this machine has too little scratch for so many rows.
    """
    scratch = join(working, "near-duplicates")
    tasks = _compared(scratch, name, config, parts, keep, execute)

    def similar() -> Iterator[SimilarPairs]:
        for number in range(tasks):
            yield SimilarPairs(number, *read_similar(scratch, number))

    size = BYTES_OF_A_ROW * len(id_hash)
    with scratch_folder(f"the near-duplicates of data set {name!r}", size) as local:
        removed = removed_rows(similar, id_hash, local)
    log.info("near-duplicates %s: %d rows go", name, len(removed.positions))
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
    """Number of tasks that have compared the pairs of rows that share a band."""
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
    ask = SendRows(scratch, pairs, firsts[:-1])
    rows, _ = exchange(scratch, f"rows {name}", ask, compared, len(parts), execute)
    of_parts = [
        CandidatePart(part, number, int(firsts[number])) for number, part in enumerate(parts)
    ]
    grams = SendCandidates(config, rows)
    candidates, _ = exchange(scratch, f"candidates {name}", grams, of_parts, tasks, execute)
    compare = ComparePairs(scratch, config.threshold, candidates)
    results = run_resumable(scratch, f"compare {name}", compare, compared, execute)
    log.info(
        "near-duplicates %s: %d pairs compared, %d similar",
        *(name, sum(r["pairs"] for r in results), sum(r["similar"] for r in results)),
    )
    return tasks


def _listed(removed: Removed) -> list[RemovedPairs]:
    """Work items of the listing: a task's similar pairs that tell why a row goes."""
    order = np.argsort(removed.task, kind="stable")
    edges = np.flatnonzero(np.diff(removed.task[order], prepend=-1))
    return [
        RemovedPairs(int(removed.task[mine[0]]), removed.pair[mine], removed.side[mine])
        for mine in np.split(order, edges)[1:]
    ]

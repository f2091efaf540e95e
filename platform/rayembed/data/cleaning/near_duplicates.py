"""Near-duplicate removal: MinHash proposes pairs, the exact Jaccard similarity of n-grams decides.

Five tasks, each bounded in memory by a part or a bucket:

    signatures   the bands of each part's signatures, cut by bucket
    buckets      rows that share a band, as pairs
    candidates   the n-grams of rows that stand in a pair, cut by where the pair is compared
    compare      pairs whose exact Jaccard similarity reaches the threshold
    list         what is removed and for which other row

This process holds the pairs, some tens of bytes for each, and no rows. Similar pairs are the edges
of a graph; of each of its components the row stays whose id has the lowest hash. So the outcome
depends neither on the number of parts nor on the rows' order.
"""

import logging
from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from rayembed.assets.storage import join
from rayembed.config.mining import NearDuplicates
from rayembed.data.cleaning.rows import RemovedRows, rows_of_parts, some
from rayembed.data.cleaning.signatures import (
    BandPart,
    PairsOfBucket,
    bands,
    read_pairs,
)
from rayembed.data.cleaning.verified import (
    ComparePairs,
    ListRemoved,
    RemovedPairs,
    SendCandidates,
    read_similar,
    split_pairs,
)
from rayembed.data.exchange import exchange
from rayembed.data.parts import Part
from rayembed.data.shuffle import Bucket
from rayembed.data.work_items import Execute, run_resumable

log = logging.getLogger(__name__)

_BANDS_PER_BUCKET = 1 << 22
"""Bands in one bucket: 24 bytes each in the file, a few hundred bytes while sorting."""


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
    """
    scratch = join(working, "near-duplicates")
    pairs = _candidate_pairs(scratch, name, config, parts, keep, execute)
    return _removed(folder, scratch, name, config, parts, pairs, id_hash, execute)


def _candidate_pairs(
    scratch: str,
    name: str,
    config: NearDuplicates,
    parts: Sequence[Part],
    keep: np.ndarray,
    execute: Execute,
) -> np.ndarray:
    """(m, 2) int64 positions of rows that share a band."""
    items = rows_of_parts(parts, keep)
    buckets = -(-int(keep.sum()) * bands(config)[0] // _BANDS_PER_BUCKET)
    task = BandPart(config, max(buckets, 1))
    what = f"signatures {name}"
    sent, _ = exchange(scratch, what, task, items, task.num_buckets, execute)
    find = PairsOfBucket(scratch, sent)
    numbers = [Bucket(number) for number in range(task.num_buckets)]
    run_resumable(scratch, f"buckets {name}", find, numbers, execute)
    found = [read_pairs(scratch, number) for number in range(task.num_buckets)]
    return np.unique(np.concatenate(found), axis=0)


def _removed(
    folder: str,
    scratch: str,
    name: str,
    config: NearDuplicates,
    parts: Sequence[Part],
    pairs: np.ndarray,
    id_hash: np.ndarray,
    execute: Execute,
) -> RemovedRows:
    """Write the listing and return the rows to remove."""
    items, candidates = split_pairs(pairs, list(parts), _firsts(parts))
    what = f"candidates {name}"
    sent, _ = exchange(scratch, what, SendCandidates(config), candidates, len(items), execute)
    compare = ComparePairs(scratch, config.threshold, sent)
    run_resumable(scratch, f"compare {name}", compare, items, execute)
    read = [read_similar(scratch, item.number) for item in items]
    similar = np.concatenate([np.empty((0, 2), np.int64), *(found for found, _ in read)])
    similarity = np.concatenate([np.empty(0, np.float32), *(values for _, values in read)])
    removed = removed_rows(similar, id_hash)
    partner, side = nearest_pairs(similar, similarity, removed, id_hash)
    log.info(
        "near-duplicates %s: %d pairs compared, %d similar, %d rows go",
        *(name, len(pairs), len(similar), len(removed)),
    )
    edges = np.cumsum([len(found) for found, _ in read])
    number = np.searchsorted(edges, partner, side="right")
    begins = np.concatenate([[0], edges])
    listed = [
        RemovedPairs(int(n), partner[number == n] - begins[n], side[number == n])
        for n in np.unique(number)
    ]
    shown = run_resumable(folder, f"list {name}", ListRemoved(folder, scratch), listed, execute)
    return RemovedRows(removed, some(result["examples"] for result in shown))


def removed_rows(similar: np.ndarray, id_hash: np.ndarray) -> np.ndarray:
    """Ascending positions (n,) int64 of removed rows: all but one of each connected component.

    Args:
        similar: (m, 2) int64 positions of rows that are similar.
        id_hash: (rows,) int64; of each component the row of the lowest stays.
    """
    nodes, edges = np.unique(similar, return_inverse=True)
    edges = edges.reshape(-1, 2)
    ones = np.ones(len(edges), dtype=np.int8)
    graph = coo_array((ones, (edges[:, 0], edges[:, 1])), shape=(len(nodes), len(nodes)))
    component = connected_components(graph, directed=False)[1]
    order = np.lexsort((nodes, id_hash[nodes], component))
    first = np.concatenate([[True], np.diff(component[order]) != 0])[: len(order)]
    return np.sort(nodes[order[~first]])


def nearest_pairs(
    similar: np.ndarray, similarity: np.ndarray, removed: np.ndarray, id_hash: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each removed row, its most similar pair and the row's side in it.

    Ties are broken by the lowest id hash.
    """
    row = np.concatenate([similar[:, 0], similar[:, 1]])
    other = np.concatenate([similar[:, 1], similar[:, 0]])
    pair = np.tile(np.arange(len(similar)), 2)
    order = np.lexsort((other, id_hash[other], -similarity[pair], row))
    rows, first = np.unique(row[order], return_index=True)
    chosen = order[first[np.searchsorted(rows, removed)]]
    return pair[chosen], chosen // max(len(similar), 1)


def _firsts(parts: Sequence[Part]) -> np.ndarray:
    """(parts,) int64 global position of each part's first row."""
    return np.concatenate([[0], np.cumsum([part.rows for part in parts])[:-1]]).astype(np.int64)

"""Which near-duplicates go: connected components of similar pairs, as large as the disk allows.

What is known of each row stands in files that are mapped into memory, with a place for every row of
the data set, of which those without a similar one are never touched.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rayembed.data.plan.scratch import mapped

BYTES_OF_A_ROW = 40
"""Bytes of scratch for each row of the data set, where all of them are similar to another."""


class SimilarPairs(NamedTuple):
    """Some of the pairs of rows that are similar, in the order of one task that compares."""

    task: int
    pairs: np.ndarray
    """(m, 2) int64 positions."""
    similarity: np.ndarray
    """(m,) float32."""


class Removed(NamedTuple):
    """Rows that go, ascending, each with its most similar pair."""

    positions: np.ndarray
    """(n,) int64."""
    task: np.ndarray
    """(n,) int32 task that compared the pair."""
    pair: np.ndarray
    """(n,) int32 number of the pair among the similar ones of the task."""
    side: np.ndarray
    """(n,) int8 side of the row in the pair."""


def removed_rows(
    chunks: Callable[[], Iterator[SimilarPairs]], id_hash: np.ndarray, scratch: Path
) -> Removed:
    """All rows but one of each connected component of similar pairs, with their nearest others.

    The row of the lowest id hash stays. Of equally similar rows the one of the lowest id hash is
    told.

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
        _join(above, chunk.pairs)
    # By root, the position of the row that stays; one more than it, so that zero is none.
    stays = mapped(scratch / "stays", rows, small)
    for chunk in chunks():
        nodes = np.unique(chunk.pairs)
        root = _roots(above, nodes)
        known = stays[root].astype(np.int64) - 1
        either = np.concatenate([nodes, known[known >= 0]])
        roots, best = _first_of(np.concatenate([root, root[known >= 0]]), id_hash, either)
        stays[roots] = best + 1
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
        order = order[stays[_roots(above, row[order])] - 1 != row[order]]
        here, there = row[order], beside[order]
        known, ids = other[here], id_hash[there]
        # Equal ones are told by (id hash, position), as within a chunk.
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


def _join(above: np.ndarray, pairs: np.ndarray) -> None:
    """Join the components of each pair: union-find, many pairs at a time."""
    first, second = pairs[:, 0], pairs[:, 1]
    while len(first):
        roots = np.stack([_roots(above, first), _roots(above, second)])
        apart = roots[0] != roots[1]
        high, low = roots.max(0)[apart], roots.min(0)[apart]
        # A root that several pairs would hang elsewhere goes to one of them; the others come again.
        above[high] = high - low
        first, second = first[apart], second[apart]


def _roots(above: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(m,) int64 lowest known row of each row's component, which then is above it directly."""
    root = rows - above[rows]
    while True:
        higher = root - above[root]
        if np.array_equal(higher, root):
            break
        root = higher
    above[rows] = rows - root
    return np.asarray(root, np.int64)


def _first_of(group: np.ndarray, id_hash: np.ndarray, rows: np.ndarray) -> tuple[Any, Any]:
    """Each group once, and its row of the lowest id hash."""
    order = np.lexsort((rows, id_hash[rows], group))
    order = order[np.diff(group[order], prepend=-1) != 0]
    return group[order], rows[order]

"""The rank that each row's own document has for its query, within a shard."""

import io
from dataclasses import dataclass

import numpy as np

from rayembed.assets.storage import join, read_bytes, write_atomic
from rayembed.data.filtering.shards import Shard, gather
from rayembed.data.parts import Part
from rayembed.data.shuffle import Bucket
from rayembed.data.units import Result
from rayembed.search.exact import top_k

DEPTH = 100
"""Ranks are told up to here, for the audit; deeper where more are kept."""

_ROUNDING = 1e-6
"""Of a cosine in float32 over some hundreds of dimensions: scores no further apart are equal."""

_QUERIES_AT_ONCE = 32_768

BINS = (1, 2, 3, 5, 10, 20, 50, 100)


def own_ranks(shard: Shard, depth: int, device: str = "cpu") -> np.ndarray:
    """(n,) int64 rank of each row's first positive, from 1; `depth` + 1 stands for any later one.

    The rank is one more than the number of documents that score higher. Each text counts once,
    equal scores do not count, nor do the row's other positives, which are right answers too.

    Args:
        device: where to search, as in `top_k`.
    """
    found = []
    for start in range(0, len(shard.row), _QUERIES_AT_ONCE):
        queries = shard.queries[start : start + _QUERIES_AT_ONCE]
        first = shard.first[start : start + len(queries) + 1]
        own = shard.documents[shard.place[first[:-1]]].astype(np.float32)
        limit = (queries.astype(np.float32) * own).sum(1) + _ROUNDING
        most = int(np.diff(first).max())
        k = min(depth + most - 1, len(shard.documents))
        scores, ids = top_k(queries, [shard.documents], k, device)
        higher = scores > limit[:, None]
        for i in np.flatnonzero(np.diff(first) > 1):
            higher[i] &= ~np.isin(ids[i], shard.place[first[i] : first[i + 1]])
        found.append(np.minimum(higher.sum(1), depth) + 1)
    return np.concatenate(found)


def histogram(ranks: np.ndarray) -> dict[str, int]:
    """How many ranks fall into each bin: `1`, `2`, `3`, `4-5`, … `51-100`, `>100`."""
    lows = [1, *(high + 1 for high in BINS[:-1])]
    names = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(lows, BINS, strict=True)]
    counts = np.bincount(np.searchsorted(BINS, ranks), minlength=len(BINS) + 1)
    return dict(zip([*names, f">{BINS[-1]}"], counts.tolist(), strict=True))


@dataclass(frozen=True)
class RankShard:
    """Task: the ranks of a shard's rows, written where `read_ranks` finds them."""

    folder: str
    parts: tuple[Part, ...]
    depth: int

    def __call__(self, unit: Bucket, device: str = "cpu") -> Result:
        """`ranks`: their histogram."""
        shard = gather(self.folder, self.parts, unit.number)
        none = np.empty(0, dtype=np.int64)
        found = {"part": none, "row": none, "rank": none}
        if shard is not None:
            ranks = own_ranks(shard, self.depth, device)
            found = {"part": shard.part, "row": shard.row, "rank": ranks}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **found)
        write_atomic(_path(self.folder, unit.number), buffer.getvalue())
        rows, counts = len(found["rank"]), histogram(found["rank"])
        return {"rows_in": rows, "rows_out": rows, "rejected": {}, "ranks": counts}


def read_ranks(folder: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Part, row and rank of each row of a shard, (n,) int64 each.

    Raises:
        ArtifactError: the file is missing.
    """
    with np.load(io.BytesIO(read_bytes(_path(folder, number)))) as loaded:
        return loaded["part"], loaded["row"], loaded["rank"]


def _path(folder: str, number: int) -> str:
    return join(folder, "ranks", f"{number}.npz")

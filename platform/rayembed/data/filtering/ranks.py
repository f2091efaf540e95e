"""Rank of each row's own document for its query, within a shard."""

from dataclasses import dataclass

import numpy as np

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import join
from rayembed.data.filtering.shards import NOT_THERE, Shard, gather
from rayembed.data.parts import Part, remedy
from rayembed.data.shuffle import Bucket
from rayembed.data.work_items import Result
from rayembed.search.counting import count_above

BINS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Upper ranks of the histogram's bins; a last bin holds all ranks beyond."""

_ROUNDING = 1e-6
"""Tolerance for equal scores: rounding of a float32 cosine over several hundred dimensions."""

_ROWS_AT_ONCE = 65_536


def own_ranks(shard: Shard, device: str = "cpu") -> np.ndarray:
    """(n,) int64 rank of each row's first positive for its query, starting at 1.

    The rank is one more than the number of documents that score higher. Each text counts once; not
    counted are equal scores, the row's other positives, which are correct too, and the query's own
    text, which is among the documents of symmetric pairs.

    Args:
        device: where to count, as in `top_k`.
    """
    own = _scores(shard, np.arange(len(shard.row)), shard.place[shard.first[:-1]])
    limits = own + np.float32(_ROUNDING)
    higher = count_above(shard.queries, limits, shard.documents, device)
    row, place = _no_rivals(shard)
    better = _scores(shard, row, place) > limits[row]
    return 1 + higher - np.bincount(row[better], minlength=len(shard.row))


def _no_rivals(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Row and document pairs excluded from ranking, each once."""
    row = np.repeat(np.arange(len(shard.row)), np.diff(shard.first))
    others = np.ones(len(row), dtype=bool)
    others[shard.first[:-1]] = False
    itself = np.flatnonzero(shard.itself != NOT_THERE)
    rows = np.concatenate([row[others], itself])
    places = np.concatenate([shard.place[others], shard.itself[itself]])
    count = len(shard.documents)
    return np.divmod(np.unique(rows * count + places), count)


def _scores(shard: Shard, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(m,) float32 scores of m rows' queries with a document each."""
    found = [np.empty(0, dtype=np.float32)]
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        queries = shard.queries[rows[some]].astype(np.float32)
        found.append(np.einsum("ij,ij->i", queries, shard.documents[places[some]]))
    return np.concatenate(found)


def histogram(ranks: np.ndarray) -> dict[str, int]:
    """Counts of ranks by bin: `1`, `2`, `3`, `4-5`, … `51-100`, `>100`."""
    lows = [1, *(high + 1 for high in BINS[:-1])]
    names = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(lows, BINS, strict=True)]
    counts = np.bincount(np.searchsorted(BINS, ranks), minlength=len(BINS) + 1)
    return dict(zip([*names, f">{BINS[-1]}"], counts.tolist(), strict=True))


@dataclass(frozen=True)
class RankShard:
    """Task: rank a shard's rows; `read_ranks` reads the file."""

    folder: str
    parts: tuple[Part, ...]

    def __call__(self, item: Bucket, device: str = "cpu") -> Result:
        """Report `ranks`, their histogram."""
        shard = gather(self.folder, self.parts, item.number)
        none = np.empty(0, dtype=np.int64)
        found = {"part": none, "row": none, "rank": none}
        if shard is not None:
            ranks = own_ranks(shard, device)
            found = {"part": shard.part, "row": shard.row, "rank": ranks}
        save_arrays(_path(self.folder, item.number), **found)
        rows, counts = len(found["rank"]), histogram(found["rank"])
        return {"rows_in": rows, "rows_out": rows, "rejected": {}, "ranks": counts}


def read_ranks(folder: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Part, row and rank of each row of a shard, (n,) int64 each.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    path = _path(folder, number)
    loaded = load_arrays(path, remedy(path))
    return loaded["part"], loaded["row"], loaded["rank"]


def _path(folder: str, number: int) -> str:
    return join(folder, "ranks", f"{number}.npz")

"""Exact top-k by inner product over a sharded corpus; knows no files and no models.

Q queries, n documents of a shard, D embedding width, k results.

Why torch: the matrix product is most of the time (0.47 of 0.62 s for 2,000 × 20,000 × 384 on two
cores; FAISS's IndexFlatIP took 0.57 s), and with all scores of a tile at hand ties can be decided
by id, which FAISS leaves to the order of its heap.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rayembed.errors import DataError

NO_RESULT = -1
"""Id of the places that stay empty when the corpus has fewer than k documents."""

_TILE_QUERIES = 512
_TILE_DOCUMENTS = 16_384


def top_k(
    queries: np.ndarray, shards: Iterable[np.ndarray], k: int, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """The k documents of highest inner product of each query, best first, ties by lower id.

    Args:
        queries: (Q, D), any float type.
        shards: parts of the corpus (n, D), any float type; read one at a time.
        k: results of each query.
        device: where to search. A GPU only where the caller has it to itself: Ray's processes see
            those of their machine also where they reserved none.

    Returns:
        Scores (Q, k) float32 and ids (Q, k) int64. Ids count through the shards in their order.
        Places beyond the size of the corpus hold `-inf` and `NO_RESULT`.

    Raises:
        DataError: k below 1, or a shard of another width than the queries.
    """
    if k < 1:
        raise DataError(f"top_k: k is {k}; it must be at least 1")
    wanted = torch.from_numpy(np.asarray(queries, dtype=np.float32)).to(device)
    scores = torch.full((len(wanted), k), -torch.inf, device=device)
    ids = torch.full((len(wanted), k), NO_RESULT, dtype=torch.int64, device=device)
    first_id = 0
    for shard in shards:
        if shard.ndim != 2 or shard.shape[1] != wanted.shape[1]:
            raise DataError(
                f"top_k: a shard has the shape {shard.shape}, expected (n, {wanted.shape[1]})"
            )
        for start in range(0, len(shard), _TILE_DOCUMENTS):
            tile = np.asarray(shard[start : start + _TILE_DOCUMENTS], dtype=np.float32)
            documents = torch.from_numpy(tile).to(device)
            for row in range(0, len(wanted), _TILE_QUERIES):
                rows = slice(row, row + _TILE_QUERIES)
                found = _best(wanted[rows] @ documents.T, k)
                scores[rows], ids[rows] = _merge(
                    (scores[rows], ids[rows]), (found[0], found[1] + first_id + start)
                )
        first_id += len(shard)
    return scores.cpu().numpy(), ids.cpu().numpy()


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and columns (Q, min(k, n)) of the best, the lower column first among equals."""
    k = min(k, scores.shape[1])
    values, columns = torch.topk(scores, k, dim=1)
    # topk takes any of the columns that tie for the last places: put in the lowest ones.
    last = values[:, -1:]
    taken = (values == last).sum(1)
    tied = (scores == last).sum(1)
    for row in torch.nonzero(tied > taken).flatten().tolist():
        lowest = torch.nonzero(scores[row] == last[row]).flatten()[: int(taken[row])]
        columns[row, k - len(lowest) :] = lowest
    return _sort(values, columns)


def _merge(kept: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The best of two lists of scores and ids, as wide as `kept`; empty places last."""
    width = kept[0].shape[1]
    values, ids = _sort(torch.cat([kept[0], found[0]], 1), torch.cat([kept[1], found[1]], 1))
    return values[:, :width], ids[:, :width]


def _sort(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Both sorted by falling value, then by rising id with `NO_RESULT` last."""
    place = torch.where(ids == NO_RESULT, torch.iinfo(torch.int64).max, ids)
    order = torch.argsort(place, dim=1, stable=True)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = torch.argsort(values, dim=1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)

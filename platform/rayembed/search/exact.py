"""Exact top-k by inner product over a sharded corpus; independent of files and models.

Q queries, n documents of a shard, D embedding width, k results.

Why not FAISS's flat index: ties are decided by id here, which FAISS leaves to the order of its
heap, and on a CPU with bfloat16 units two passes were faster (docs/LOG.md has both in one run).
"""

from collections.abc import Generator, Iterable
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from rayembed.ahead import done_ahead
from rayembed.errors import DataError
from rayembed.search.order import NO_RESULT, merged
from rayembed.search.tiles import best_documents, tiles_of


def top_k(
    queries: np.ndarray, shards: Iterable[np.ndarray], k: int, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """The k documents with the highest inner product for each query, best first, ties by lower id.

    Scores tie as computed in float32: copies of a document that stand in different chunks of a
    large corpus may come out a rounding apart.

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
    if not len(wanted):
        return scores.cpu().numpy(), ids.cpu().numpy()
    tiles = tiles_of(wanted.device, wanted.shape[1])

    def ready(chunk: np.ndarray) -> Tensor:
        found = _as_tensor(chunk)
        return found.pin_memory() if wanted.device.type == "cuda" else found

    first_id = 0
    # The next chunk is read while this one is searched: two are held besides it at most.
    chunks = _chunks(shards, wanted.shape[1], tiles.chunk)
    with closing(done_ahead(ready, chunks, read_ahead=1)) as coming:
        for chunk in coming:
            documents = chunk.to(device, non_blocking=True)
            for rows, found, places in best_documents(wanted, documents, k, tiles):
                kept = scores[rows], ids[rows]
                scores[rows], ids[rows] = merged(kept, (found, places + first_id))
            first_id += len(documents)
    return scores.cpu().numpy(), ids.cpu().numpy()


def _chunks(shards: Iterable[np.ndarray], width: int, size: int) -> Generator[np.ndarray]:
    """Corpus in chunks of `size` documents: small shards are joined, large ones split.

    Raises:
        DataError: a shard of another width.
    """
    waiting: list[np.ndarray] = []
    count = 0
    for shard in shards:
        if shard.ndim != 2 or shard.shape[1] != width:
            raise DataError(f"top_k: a shard has the shape {shard.shape}, expected (n, {width})")
        start = 0
        while start < len(shard):
            part = shard[start : start + size - count]
            start += len(part)
            count += len(part)
            waiting.append(part)
            if count == size:
                yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                waiting, count = [], 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)


def _as_tensor(vectors: np.ndarray) -> Tensor:
    """Tensor in half precision if given so, else in float32."""
    kind = np.float16 if vectors.dtype == np.float16 else np.float32
    return torch.from_numpy(np.ascontiguousarray(vectors, dtype=kind))

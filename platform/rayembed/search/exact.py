"""Exact top-k by inner product over a sharded corpus; independent of files and models.

Q queries, n documents of a shard, D embedding width, k results.

Why not FAISS's flat index: ties are decided by id here, which FAISS leaves to the order of its
heap, and on a CPU with bfloat16 units two passes were faster (docs/LOG.md has both in one run).
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from rayembed.errors import DataError
from rayembed.hardware import bfloat16_speed
from rayembed.search.order import NO_RESULT, best_columns, merged
from rayembed.search.two_passes import CorpusChunk, best_of_chunk

_TILE_QUERIES = 512
_TILE_DOCUMENTS = 16_384
_CHUNK_DOCUMENTS = 131_072
"""Documents in a chunk for two passes: their rounded products with 512 queries take 128 MiB."""

_RESULTS_OF_PIECE = 1 / 200
"""Maximum k as a share of the documents for which two passes pay off."""

_WORTH_TWO_PASSES = 1.5
"""Minimum speed of bfloat16 products relative to float32 for which two passes pay off."""

_WORTH_IT = 0.8
"""Minimum share of queries that the first pass must prove; else the remaining ones skip it."""


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
    first_id = 0
    if not len(wanted):
        return scores.cpu().numpy(), ids.cpu().numpy()
    for chunk in _chunks(shards, wanted.shape[1]):
        for rows, found, places in _search(wanted, _as_tensor(chunk).to(device), k):
            scores[rows], ids[rows] = merged((scores[rows], ids[rows]), (found, places + first_id))
        first_id += len(chunk)
    return scores.cpu().numpy(), ids.cpu().numpy()


def _chunks(shards: Iterable[np.ndarray], width: int) -> Iterator[np.ndarray]:
    """Corpus in chunks of `_CHUNK_DOCUMENTS`: small shards are joined, large ones split.

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
            part = shard[start : start + _CHUNK_DOCUMENTS - count]
            start += len(part)
            count += len(part)
            waiting.append(part)
            if count == _CHUNK_DOCUMENTS:
                yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                waiting, count = [], 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)


def _as_tensor(vectors: np.ndarray) -> Tensor:
    """Tensor in half precision if given so, else in float32."""
    kind = np.float16 if vectors.dtype == np.float16 else np.float32
    return torch.from_numpy(np.ascontiguousarray(vectors, dtype=kind))


def _search(queries: Tensor, documents: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Query rows with scores and positions of their best documents in a chunk.

    A row comes as often as there are tiles, or once.
    """
    left = torch.arange(len(queries), device=queries.device)
    # GPUs were not measured.
    halves = queries.device.type == "cpu" and bfloat16_speed() >= _WORTH_TWO_PASSES
    if halves and k <= len(documents) * _RESULTS_OF_PIECE:
        chunk, unproven = CorpusChunk.of(documents, _TILE_QUERIES), []
        for some in torch.split(left, _TILE_QUERIES):
            scores, places, proven = best_of_chunk(queries[some], chunk, k)
            unproven.append(some[~proven])
            yield some[proven], scores[proven], places[proven]
            if proven.float().mean() < _WORTH_IT:  # scores too near one another
                unproven.append(left[int(some[-1]) + 1 :])
                break
        left = torch.cat(unproven)
    for start in range(0, len(documents) if len(left) else 0, _TILE_DOCUMENTS):
        tile = documents[start : start + _TILE_DOCUMENTS].float()
        for some in torch.split(left, _TILE_QUERIES):
            scores, places = best_columns(queries[some] @ tile.T, k)
            yield some, scores, places + start

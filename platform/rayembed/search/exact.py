"""Exact top-k by inner product over a sharded corpus; independent of files and models.

Q queries, n documents of a shard, D embedding width, k results.

Why not FAISS's flat index: ties are decided by id here, which FAISS leaves to the order of its
heap, and on a CPU with bfloat16 units two passes were faster (benchmarks/log has both in one run).
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from rayembed.display.progress import tell
from rayembed.errors import DataError
from rayembed.machine.ahead import done_ahead
from rayembed.search.order import NO_RESULT, merged
from rayembed.search.tiles import CPU, best_documents, tiles_of
from rayembed.search.two_passes import CorpusChunk

TopK = tuple[np.ndarray, np.ndarray]
"""Scores (Q, k) float32 and ids (Q, k) int64, as `top_k` returns them."""

SHARD_STEP = CPU.chunk
"""Multiple at which shards must begin, so that they divide the corpus as a whole search does."""


def top_k(
    queries: np.ndarray, shards: Iterable[np.ndarray], k: int, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k documents with the highest inner product for each query, best first, ties by lower
    id.

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
    return top_k_of_blocks([queries], shards, k, device)[0]


def top_k_of_blocks(
    blocks: Sequence[np.ndarray],
    shards: Iterable[np.ndarray],
    k: int,
    device: str = "cpu",
    first_id: int = 0,
    of: int | None = None,
) -> list[TopK]:
    """Run `top_k` for several blocks of queries in one pass over the corpus; results equal separate
    searches bit by bit.

    Held are the queries in the number type that they have, and 12 bytes for each of their results.

    Args:
        first_id: id of the first document, a multiple of `SHARD_STEP` where shards of one corpus
            are searched apart: `merged_top_k` of them is then what one search finds on a CPU.
        of: number of documents, by which it is told how far the search is.
    """
    begin = first_id
    if k < 1:
        raise DataError(f"top_k: k is {k}; it must be at least 1")
    wanted = [_as_tensor(block).to(device) for block in blocks]
    found = [
        (
            torch.full((len(block), k), -torch.inf, device=device),
            torch.full((len(block), k), NO_RESULT, dtype=torch.int64, device=device),
        )
        for block in wanted
    ]
    if any(len(block) for block in wanted):
        width = next(block.shape[1] for block in wanted if len(block))
        tiles = tiles_of(torch.device(device), width)
        # The next chunk is read while this one is searched: two are held besides it at most.
        chunks = _chunks(shards, width, tiles.chunk)
        ready = partial(_ready, pinned=torch.device(device).type == "cuda")
        with closing(done_ahead(ready, chunks, read_ahead=1)) as coming:
            for chunk in coming:
                documents = chunk.to(device, non_blocking=True)
                rounded = cache(partial(CorpusChunk.of, documents, tiles.queries))
                for place, (block, (scores, ids)) in enumerate(zip(wanted, found, strict=True)):
                    if of:
                        tell((first_id - begin + len(documents) * place / len(wanted)) / of)
                    best = best_documents(block.float(), documents, k, tiles, rounded)
                    for rows, of_rows, places in best if len(block) else ():
                        kept = scores[rows], ids[rows]
                        scores[rows], ids[rows] = merged(kept, (of_rows, places + first_id))
                first_id += len(documents)
    return [(scores.cpu().numpy(), ids.cpu().numpy()) for scores, ids in found]


def merged_top_k(first: TopK, second: TopK) -> TopK:
    """Merge the results of two shards for the same queries, in the order of `top_k`."""
    kept, found = (tuple(map(torch.from_numpy, one)) for one in (first, second))
    scores, ids = merged((kept[0], kept[1]), (found[0], found[1]))
    return scores.numpy(), ids.numpy()


def _ready(chunk: np.ndarray, *, pinned: bool) -> Tensor:
    found = _as_tensor(chunk)
    return found.pin_memory() if pinned else found


def _chunks(shards: Iterable[np.ndarray], width: int, size: int) -> Generator[np.ndarray]:
    """Divide the corpus into chunks of `size` documents: small shards are joined, large ones split.

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
    """Convert vectors to a tensor, in float16 if they are float16, else in float32."""
    kind = np.float16 if vectors.dtype == np.float16 else np.float32
    return torch.from_numpy(np.ascontiguousarray(vectors, dtype=kind))

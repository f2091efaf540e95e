"""Search kernel shared by mining, filtering and evaluation: searches part of a corpus on one
device.

Products are made in tiles of bounded memory, in float32, or where the device has units for it in
bfloat16 first and then exactly (`two_passes`). It knows nothing of files, shards and workers.

Q queries, n documents of the part, D embedding width, k results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rayembed.machine.hardware import auto_precision, bfloat16_speed, free_memory
from rayembed.search.order import best_columns
from rayembed.search.two_passes import TILE_DOCUMENTS, CorpusChunk, best_of_chunk, exact_products

_RESULTS_OF_PIECE = 1 / 200
"""Maximum k as a share of the documents for which two passes pay off."""

_WORTH_TWO_PASSES = 1.5
"""Minimum speed of bfloat16 products relative to float32 for which two passes pay off."""

_WORTH_IT = 0.8
"""Minimum share of queries whose results the first pass must prove; else the remaining ones skip
it."""

_GPU_BYTES = 1 << 30
"""Maximum bytes of each array of a search on a GPU: a chunk, a tile of products."""

_GPU_SHARE = 1 / 8
"""The same as a share of the GPU's free memory: models may be on it too."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the arrays that a search processes at a time."""

    chunk: int
    """Number of documents on the device."""
    documents: int
    """Number of documents in a tile of float32 products."""
    scores: int
    """Maximum number of float32 products in a tile, limited by memory."""
    queries: int
    """Number of queries in a tile of rounded products with all documents of a chunk."""


CPU = Tiles(chunk=131_072, documents=16_384, scores=1 << 23, queries=512)
"""Tile sizes that fit CPU caches; rounded products of a chunk take 128 MiB."""


def tiles_of(device: torch.device, width: int) -> Tiles:
    """Choose tile sizes for a device and the width D; on a GPU as large as `_GPU_BYTES` and its
    free memory allow.

    A product is as fast as the GPU only if it is large: 3,072 queries with 172,032 documents of
    1,024 dimensions are 1.1 TFLOP.
    """
    return CPU if device.type == "cpu" else gpu_tiles(free_memory(str(device)), width)


def gpu_tiles(free: int, width: int) -> Tiles:
    """Choose tile sizes for a GPU with `free` bytes; see `tiles_of`."""
    room = min(_GPU_BYTES, int(free * _GPU_SHARE))
    # A document is there as it was given, in up to 4 bytes a number, and rounded.
    chunk = max(1, room // (6 * width * TILE_DOCUMENTS)) * TILE_DOCUMENTS
    chunk = min(chunk, 2 * CPU.chunk)
    queries = min(max(room // (2 * chunk) // 128, 1) * 128, 4096)
    return Tiles(chunk, documents=min(chunk, 65_536), scores=max(room // 4, 1), queries=queries)


class Best(NamedTuple):
    """Best documents for T queries, by falling score; ties go to the lower index."""

    rows: Tensor
    """(T,) int64 rows of the queries."""
    scores: Tensor
    """(T, min(k, n)) float32."""
    places: Tensor
    """(T, min(k, n)) int64 places of documents."""


class Above(NamedTuple):
    """Pairs of a query and a document whose score reaches the query's threshold."""

    rows: Tensor
    """(R,) int64 rows of the queries."""
    scores: Tensor
    """(R,) float32."""
    places: Tensor
    """(R,) int64 places of documents."""


def best_documents(
    queries: Tensor,
    documents: Tensor,
    k: int,
    tiles: Tiles,
    rounded: Callable[[], CorpusChunk] | None = None,
) -> Iterator[Best]:
    """Yield the k best documents of groups of queries; each query occurs once, or once for each
    tile of documents.

    Exact either way: what two passes cannot prove for a query is searched for in float32.

    Args:
        queries: (Q, D) float32.
        documents: (n, D) float16 or float32 on the same device, n at most `tiles.chunk`.
        rounded: makes `CorpusChunk.of(documents, tiles.queries)`, where it serves further queries;
            None: it is made here.
    """
    left = torch.arange(len(queries), device=queries.device)
    if k <= len(documents) * _RESULTS_OF_PIECE and rounds_first(queries.device):
        chunk, unproven = rounded() if rounded else CorpusChunk.of(documents, tiles.queries), []
        for some in torch.split(left, tiles.queries):
            scores, places, proven = best_of_chunk(queries[some], chunk, k)
            count = int(proven.sum())
            if count == len(some):
                yield Best(some, scores, places)
                continue
            unproven.append(some[~proven])
            yield Best(some[proven], scores[proven], places[proven])
            if count < _WORTH_IT * len(some):  # scores too near one another
                unproven.append(left[int(some[-1]) + 1 :])
                break
        left = torch.cat(unproven) if unproven else left[:0]
    for rows, first, scores in products(queries, documents, tiles, left):
        best, columns = best_columns(scores, k)
        yield Best(rows, best, columns + first)


def documents_above(
    queries: Tensor, documents: Tensor, lowest: Tensor, tiles: Tiles
) -> Iterator[Above]:
    """Yield the documents whose score with a query is at least the query's `lowest` (Q,) float32,
    in any order.

    Cheaper than a selection where little is left to find; arguments as in `best_documents`.
    """
    for rows, first, scores in products(queries, documents, tiles):
        row, column = torch.nonzero(scores >= lowest[rows, None], as_tuple=True)
        yield Above(rows[row], scores[row, column], column + first)


def products(
    queries: Tensor, documents: Tensor, tiles: Tiles, rows: Tensor | None = None
) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield float32 inner products tile by tile: query rows (T,), index of the first document, and
    products (T, n).

    Args:
        rows: those of the queries that are wanted; None: all.
    """
    if rows is None:
        rows = torch.arange(len(queries), device=queries.device)
    for first in range(0, len(documents) if len(rows) else 0, tiles.documents):
        tile = documents[first : first + tiles.documents].float()
        for some in torch.split(rows, max(1, tiles.scores // len(tile))):
            with exact_products():
                scores = queries[some] @ tile.T
            yield some, first, scores


def rounds_first(device: torch.device) -> bool:
    """Whether bfloat16 is so much faster on the device that a first pass with rounded products pays
    off.
    """
    if device.type == "cpu":
        return bfloat16_speed() >= _WORTH_TWO_PASSES
    return auto_precision(str(device)).dtype == "bfloat16"

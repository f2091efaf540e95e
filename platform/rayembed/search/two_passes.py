"""Search a chunk of the corpus in two passes: first with products rounded to bfloat16, then with
exact scores of the best.

Most of an exact search is the product of all queries with all documents, and processors with
bfloat16 units make it in less than half the time that float32 takes (GPUs in a tenth, by their data
sheets). So the first pass takes
rounded products and keeps, of each block of documents, the highest; the best blocks are opened, the
best of their documents scored exactly. What rounding can do to a product at most is known (Cauchy
and Schwarz on what it took from either vector), so that each query's result is either proven to be
exact, or searched for again with more candidates, or with all documents.

T queries, n documents of the chunk, D embedding width, k results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rayembed.machine.hardware import float32_products
from rayembed.search.order import best_in_order

_BLOCK = 32
TILE_DOCUMENTS = 8192
"""Documents of one product; chunks are padded to a multiple of it."""
_SLACK, _SECOND_SLACK = 48, 512
"""Candidates beyond k in the first and second attempt."""

_GATHERED = 1 << 25
"""Elements of documents gathered at once, 128 MiB in float32."""

_ROUNDING = 2.0**-8
"""Relative rounding error of bfloat16, with a safety factor of 2."""


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products without TF32 or bfloat16 inside the block, and sum bfloat16 products
    in float32.

    By default cuBLAS may split the sum of a bfloat16 product, and then adds the parts in bfloat16.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with float32_products("highest"):
        matmul.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = before


@dataclass(frozen=True)
class CorpusChunk:
    """A chunk of documents in the exact and the rounded form that the two passes need."""

    exact: Tensor
    """(n, D) documents as given, any float type."""
    tiles: Tensor
    """(tiles, TILE_DOCUMENTS, D) bfloat16, the last tile zero-padded."""
    longest: Tensor
    """Maximum norm of a document."""
    taken: Tensor
    """Maximum norm of a document's rounding error."""
    products: Tensor
    """(tiles, maximum queries at once, TILE_DOCUMENTS) bfloat16 buffer, reused since fresh memory
    costs a third of the products' time."""

    @classmethod
    def of(cls, documents: Tensor, most_queries: int) -> "CorpusChunk":
        """Make the chunk from (n, D) documents, n > 0."""
        count, width = documents.shape
        number = -(-count // TILE_DOCUMENTS)
        tiles = documents.new_zeros(number, TILE_DOCUMENTS, width, dtype=torch.bfloat16)
        longest, taken = [], []
        for tile, part in zip(tiles, torch.split(documents, TILE_DOCUMENTS), strict=True):
            whole = part.float()
            rounded = tile[: len(part)].copy_(whole)
            longest.append(whole.norm(dim=1).max())
            taken.append((whole - rounded.float()).norm(dim=1).max())
        room = tiles.new_empty(number, most_queries, TILE_DOCUMENTS)
        return cls(documents, tiles, torch.stack(longest).max(), torch.stack(taken).max(), room)


def best_of_chunk(queries: Tensor, chunk: CorpusChunk, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best documents of each query, by falling score, and whether they are proven to be
    the best.

    Args:
        queries: (T, D) float32, at most as many as the chunk has room for.
        k: at most n.

    Returns:
        Scores (T, k) float32, places in the chunk (T, k), and (T,) whether they are proven to be
        the best; the others must be searched for without rounding.
    """
    products = _rounded_products(queries, chunk)
    scores, places, proven = _try(queries, products, chunk, k, _SLACK)
    rows = torch.nonzero(~proven).flatten()
    if len(rows):
        scores[rows], places[rows], proven[rows] = _try(
            queries[rows], products[:, rows], chunk, k, _SECOND_SLACK
        )
    return scores, places, proven


def _rounded_products(queries: Tensor, chunk: CorpusChunk) -> Tensor:
    """(tiles, T, _BLOCK, blocks of a tile) bfloat16 inner products; padded documents have
    -inf.

    A block is what stands below one another: `max` over it then runs along the memory.
    """
    rounded = queries.bfloat16()
    tiles = len(chunk.tiles)
    products = chunk.products[:, : len(queries)]
    assert products.shape[1] == len(queries), "more queries than the chunk has room for"
    with exact_products():
        for number in range(tiles):
            torch.mm(rounded, chunk.tiles[number].T, out=products[number])
    products[-1, :, len(chunk.exact) - (tiles - 1) * TILE_DOCUMENTS :] = -torch.inf
    return products.view(tiles, len(queries), _BLOCK, TILE_DOCUMENTS // _BLOCK)


def _try(
    queries: Tensor, products: Tensor, chunk: CorpusChunk, k: int, slack: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the k + slack best documents by rounded products exactly, and select the k best; see
    `best_of_chunk`.
    """
    tiles, rows, _, blocks = products.shape
    highest = products.amax(2).transpose(0, 1).reshape(rows, tiles * blocks)
    opened = min(k + slack, highest.shape[1])
    block_values, block = highest.topk(opened, dim=1)
    tile, column = block // blocks, block % blocks
    row = torch.arange(rows, device=queries.device)[:, None]
    inside = products[tile, row, :, column]  # (rows, opened, _BLOCK)
    candidates = min(k + slack, opened * _BLOCK)
    values, found = inside.flatten(1).topk(candidates, dim=1)
    chosen, line = found // _BLOCK, found % _BLOCK
    places = (
        tile.gather(1, chosen) * TILE_DOCUMENTS + line * blocks + column.gather(1, chosen)
    ).clamp_(max=len(chunk.exact) - 1)
    exact = _exact_scores(queries, chunk.exact, places)
    exact.masked_fill_(values == -torch.inf, -torch.inf)
    scores, places = best_in_order(exact, places, k)
    # The rounded products of all other documents are at most this:
    rest = values[:, -1].float()
    if candidates == opened * _BLOCK:
        rest = rest.new_full(rest.shape, -torch.inf)
    if opened < highest.shape[1]:
        rest = torch.maximum(rest, block_values[:, -1].float())
    return scores, places, scores[:, -1] > rest + _margin(queries, rest, chunk)


def _exact_scores(queries: Tensor, documents: Tensor, places: Tensor) -> Tensor:
    """(T, c) float32 inner products of each query with the documents at its positions `places` (T,
    c).
    """
    rows = max(1, _GATHERED // (places.shape[1] * documents.shape[1]))
    scores = []
    for some, of_some in zip(torch.split(places, rows), torch.split(queries, rows), strict=True):
        # An embedding's look-up copies rows in two thirds of the time that an index takes.
        gathered = functional.embedding(some, documents).float()
        with exact_products():
            scores.append(torch.bmm(gathered, of_some.unsqueeze(2)).squeeze(2))
    return torch.cat(scores)


def _margin(queries: Tensor, products: Tensor, chunk: CorpusChunk) -> Tensor:
    """Compute an upper bound on how much an exact score may exceed its rounded product.

    ‖q − q̃‖·‖d‖ + ‖q̃‖·‖d − d̃‖ for the vectors, the rounding of the product itself, and float32 sums,
    at 2⁻²³ for each term, since GPUs' units for bfloat16 cut off where others round.
    """
    rounded = queries.bfloat16().float()
    lost = (queries - rounded).norm(dim=1) * chunk.longest + rounded.norm(dim=1) * chunk.taken
    sums = queries.norm(dim=1) * chunk.longest * queries.shape[1] * 2.0**-23
    # A hundredth for the rounding of the norms, and what bfloat16 units take for zero.
    vectors: Tensor = 1.01 * (lost + sums) + queries.shape[1] * 2.0**-126
    return vectors + products.abs().nan_to_num(posinf=0.0) * _ROUNDING

"""Group texts of similar length into micro-batches of limited token count, at the lowest
cost.

Padded micro-batches cost `count · longest` tokens, packed ones the sum of their texts' tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rayembed.models.attention.unpadded import packs
from rayembed.models.contract import EmbeddingModel, PackingTokenizer, Tokenizer, Tokens


def cut_by_length(
    lengths: Sequence[int], budget: int, pass_cost: int, *, packed: bool = False
) -> list[list[int]]:
    """Split texts into micro-batches, the longest texts first; return lists of text
    indices.

    A micro-batch of texts padded to its longest costs `count · longest` tokens, which stays within
    `budget` unless one text alone exceeds it, and `pass_cost` tokens besides. Of all ways to cut
    the texts in order of their length it is the one that costs the least, found by dynamic
    programming: the best way to cut the first texts goes on with every micro-batch that may begin
    behind them. Of ways that cost the same it takes long micro-batches at the end.

    Packed, the tokens cost the same however they are cut: each micro-batch takes texts as long as
    they fit, and these are the fewest passes.

    Args:
        lengths: tokens of each text.
        budget: tokens of a micro-batch, padding included.
        pass_cost: what a forward pass costs beside its tokens, in tokens.
        packed: whether micro-batches have no padding.
    """
    count = len(lengths)
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    if packed:
        return _filled(order, lengths, budget)
    descending = np.asarray(lengths, dtype=np.int64)[order]
    most = np.minimum(np.maximum(budget // np.maximum(descending, 1), 1), count - np.arange(count))
    ramp = np.arange(1, int(most.max(initial=0)) + 1)
    costs = np.full(count + 1, np.iinfo(np.int64).max)  # of the first texts, cut at best
    costs[0] = 0
    starts = np.zeros(count + 1, dtype=np.int64)  # of the last micro-batch among them
    for first, (longest, texts) in enumerate(zip(descending.tolist(), most.tolist(), strict=True)):
        reached = costs[first + 1 : first + 1 + texts]
        found = ramp[:texts] * longest + (costs[first] + pass_cost)
        cheaper = found < reached
        np.copyto(reached, found, where=cheaper)
        starts[first + 1 : first + 1 + texts][cheaper] = first
    cuts: list[list[int]] = []
    end = count
    while end:
        cuts.append(order[starts[end] : end].tolist())
        end = int(starts[end])
    return cuts[::-1]


def _filled(order: np.ndarray, lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fill micro-batches with texts in the given order, up to the token budget; a longer text gets
    one of its own.
    """
    cuts: list[list[int]] = []
    left = 0
    for place in order.tolist():
        if not cuts or lengths[place] > left:
            cuts.append([])
            left = budget
        cuts[-1].append(place)
        left -= lengths[place]
    return cuts


def cut_for(
    model: EmbeddingModel, lengths: Sequence[int], budget: int, pass_cost: int
) -> list[list[int]]:
    """Split texts into micro-batches by `cut_by_length`, padded or packed as the model requires."""
    return cut_by_length(lengths, budget, pass_cost, packed=packs(model))


def padded_tokens(
    lengths: Sequence[int], cuts: Sequence[Sequence[int]], *, packed: bool = False
) -> int:
    """Total tokens of the micro-batches, padding included."""
    if packed:
        return sum(lengths[place] for cut in cuts for place in cut)
    return sum(len(cut) * max(lengths[place] for place in cut) for cut in cuts)


def collate(
    model: EmbeddingModel, tokens: Sequence[Tokens], places: Sequence[int]
) -> dict[str, Tensor]:
    """Collate the texts at these indices to one micro-batch, padded or packed as the model
    requires.
    """
    way = ways_to_collate(model.tokenizer)[packs(model)]
    return way([tokens[place] for place in places])


def ways_to_collate(
    tokenizer: Tokenizer,
) -> tuple[Callable[[Sequence[Tokens]], dict[str, Tensor]], ...]:
    """Return a tokenizer's functions that collate a micro-batch: the padding one and, if supported,
    the packing one.
    """
    packing = (tokenizer.pack,) if isinstance(tokenizer, PackingTokenizer) else ()
    return (tokenizer.collate, *packing)


def places_in_row_order(cuts: Sequence[Sequence[int]]) -> Tensor:
    """(N,) int64 position of each text in the concatenated outputs of the micro-batches."""
    order = torch.tensor([place for cut in cuts for place in cut], dtype=torch.int64)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places

"""Cutting texts into micro-batches: sorted by length, under a token budget, at the least cost."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rayembed.models.contract import EmbeddingModel, Tokens


def cut_by_length(lengths: Sequence[int], budget: int, pass_cost: int) -> list[list[int]]:
    """Places of the texts in each micro-batch, the longest texts first.

    A micro-batch of texts padded to its longest costs `count · longest` tokens, which stays within
    `budget` unless one text alone exceeds it, and `pass_cost` tokens besides. Of all ways to cut
    the texts in order of their length it is the one that costs the least, found by dynamic
    programming: the best way to cut the first texts goes on with every micro-batch that may begin
    behind them. Of ways that cost the same it takes long micro-batches at the end.

    Args:
        lengths: tokens of each text.
        budget: padded tokens of a micro-batch.
        pass_cost: what a forward pass costs beside its tokens, in tokens.
    """
    count = len(lengths)
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
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


def padded_tokens(lengths: Sequence[int], cuts: Sequence[Sequence[int]]) -> int:
    """Total tokens of the micro-batches, padding included."""
    return sum(len(cut) * max(lengths[place] for place in cut) for cut in cuts)


def collate(
    model: EmbeddingModel, tokens: Sequence[Tokens], places: Sequence[int]
) -> dict[str, Tensor]:
    """Collate the micro-batch of the texts at these indices."""
    return model.tokenizer.collate([tokens[place] for place in places])


def places_in_row_order(cuts: Sequence[Sequence[int]]) -> Tensor:
    """(N,) int64 index of each text in the concatenated outputs of the micro-batches."""
    order = torch.tensor([place for cut in cuts for place in cut], dtype=torch.int64)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places

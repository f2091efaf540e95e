"""Micro-batches: texts sorted by length and cut by a token budget."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayembed.models.contract import EmbeddingModel, Tokens


def cut_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the texts in each micro-batch, longest micro-batch first.

    A micro-batch of texts padded to its longest costs `count · longest` tokens, which stays within
    `budget` unless one text alone exceeds it. Sorting makes padding small; the longest first, so
    that memory is known to suffice after the first one.

    Args:
        lengths: tokens of each text.
        budget: padded tokens of a micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    cuts: list[list[int]] = []
    longest = 0
    for place in order:
        if cuts and (len(cuts[-1]) + 1) * longest <= budget:
            cuts[-1].append(place)
        else:
            cuts.append([place])
            longest = lengths[place]
    return cuts


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

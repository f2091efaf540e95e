"""Where zeros stand in pruned matrices: chosen by scores, and counted.

A matrix is (F, H), F outputs and H inputs; groups of N:M are M neighbours along the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rayembed.config.compression import Structure


class Group(NamedTuple):
    """Zeros of each group of neighbours."""

    zeros: int
    size: int


GROUPS: dict[Structure, Group] = {"2:4": Group(2, 4), "4:8": Group(4, 8)}


def smallest_mask(scores: Tensor, number: int) -> Tensor:
    """True at the `number` smallest scores of each row; of equal ones at those that come first.

    torch.topk, which llm-compressor takes for groups, leaves it to the machine which of equal
    scores it takes.
    """
    order = torch.sort(scores, dim=-1, stable=True).indices
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(-1, order[..., :number], True)


def group_mask(scores: Tensor, structure: Structure) -> Tensor:
    """(F, H) true at the smallest scores of each group of N:M, as `smallest_mask`."""
    group = GROUPS[structure]
    grouped = scores.reshape(len(scores), -1, group.size)
    return smallest_mask(grouped, group.zeros).view_as(scores)


def broken_groups(weight: Tensor, structure: Structure) -> int:
    """Number of groups that have fewer zeros than the structure asks for."""
    group = GROUPS[structure]
    zeros = (weight == 0).reshape(len(weight), -1, group.size).sum(dim=-1)
    return int((zeros < group.zeros).sum())

"""Context documents of a step: drawn from the global batch, the same for all texts and workers.

G rows of the global batch, J documents that a model takes at most.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rayembed.distributed.collectives import largest, rank
from rayembed.distributed.grad_cache import ContextPasses
from rayembed.models.contract import EmbeddingModel, Tokens, cost
from rayembed.models.micro_batches import collate, places_in_row_order


def context_rows(
    num_rows: int, max_context: int | None, *, seed: int, stage: str, step: int
) -> np.ndarray:
    """(n,) int64 rows of the global batch whose positives are the context, in the order of the
    draw.

    A draw without replacement of J of the G rows, all of them where G is smaller ("if the batch
    size exceeds the number of contextual documents, we randomly sample", arXiv 2410.02525, section
    5). It depends on nothing but its arguments, so that all workers, and any number of them, draw
    the same; without a limit all rows in their order.
    """
    if max_context is None:
        return np.arange(num_rows)
    generator = np.random.default_rng([seed, zlib.crc32(stage.encode()), step])
    return generator.permutation(num_rows)[:max_context]


def context_passes(
    embed: Callable[[dict[str, Tensor]], Tensor],
    model: EmbeddingModel,
    documents: Sequence[Tokens],
    rows: np.ndarray,
    cut: Callable[[Sequence[int]], list[list[int]]],
    device: torch.device,
) -> ContextPasses:
    """First-stage passes over this worker's share of the context.

    Args:
        documents: of each row of this worker; every worker has as many.
        rows: what `context_rows` gives.
        cut: places of the documents in each micro-batch, of their lengths.
    """
    workers, places = np.divmod(rows, len(documents))
    own = places[workers == rank()]
    cuts = cut([cost(documents[place]) for place in own])
    chosen = [[int(own[i]) for i in places_of_own] for places_of_own in cuts]
    num_passes = largest(len(cuts), device)
    filler = [chosen[-1][-1]] if chosen else [0]
    # Each worker hands over its documents in the order of the draw.
    before = np.array([(workers[:i] == worker).sum() for i, worker in enumerate(workers)])
    num_rows = int(np.bincount(workers).max())
    order = torch.from_numpy(workers * num_rows + before)
    filled = chosen + [filler] * (num_passes - len(chosen))
    return ContextPasses(
        embed=embed,
        micro_batches=[collate(model, documents, chosen_rows) for chosen_rows in filled],
        num_fillers=num_passes - len(cuts),
        arrange=places_in_row_order(cuts).to(device),
        num_rows=num_rows,
        order=order.to(device),
    )

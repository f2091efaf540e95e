"""Context documents of a step: drawn from the global batch, the same for all texts and workers.

G rows of the global batch, J documents that a model takes at most.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayembed.distributed.collectives import rank
from rayembed.distributed.grad_cache import ContextPasses
from rayembed.models.contract import EmbeddingModel, Tokens, cost, moved
from rayembed.models.passes.micro_batches import collate, places_in_row_order


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


@dataclass(frozen=True)
class CollatedContext:
    """First-stage micro-batches of a worker's share of a step's context, on the CPU."""

    micro_batches: list[dict[str, Tensor]]
    filler: dict[str, Tensor]
    """One document, for passes that other workers have more of."""
    arrange: Tensor
    num_rows: int
    order: Tensor
    """These three as in `ContextPasses`."""

    @property
    def num_passes(self) -> int:
        """Passes of this worker."""
        return len(self.micro_batches)

    def passes(
        self, embed: Callable[[dict[str, Tensor]], Tensor], num_passes: int, device: torch.device
    ) -> ContextPasses:
        """First-stage passes over the share, as many as the worker with the most has."""
        num_fillers = num_passes - self.num_passes
        return ContextPasses(
            embed=embed,
            micro_batches=self.micro_batches + [self.filler] * num_fillers,
            num_fillers=num_fillers,
            arrange=moved(self.arrange, device),
            num_rows=self.num_rows,
            order=moved(self.order, device),
        )


def collate_context(
    model: EmbeddingModel,
    documents: Sequence[Tokens],
    rows: np.ndarray,
    cut: Callable[[Sequence[int]], list[list[int]]],
    ready: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> CollatedContext:
    """The context documents of this worker in micro-batches.

    Args:
        documents: of each row of this worker; every worker has as many.
        rows: what `context_rows` gives.
        cut: places of the documents in each micro-batch, of their lengths.
        ready: what is done at last to what a device gets.
    """
    workers, places = np.divmod(rows, len(documents))
    own = places[workers == rank()]
    cuts = cut([cost(documents[place]) for place in own])
    chosen = [[int(own[i]) for i in places_of_own] for places_of_own in cuts]
    filler = [chosen[-1][-1]] if chosen else [0]
    # Each worker hands over its documents in the order of the draw.
    before = np.array([(workers[:i] == worker).sum() for i, worker in enumerate(workers)])
    num_rows = int(np.bincount(workers).max())
    order = torch.from_numpy(workers * num_rows + before)
    indices = ready({"arrange": places_in_row_order(cuts), "order": order})
    return CollatedContext(
        micro_batches=[ready(collate(model, documents, places)) for places in chosen],
        filler=ready(collate(model, documents, filler)),
        arrange=indices["arrange"],
        num_rows=num_rows,
        order=indices["order"],
    )

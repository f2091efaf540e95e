"""A worker's batch as its step takes it: cut into micro-batches and collated, ahead of the step.

It needs nothing of the other workers, so that a thread makes it while the step before computes.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import world_size
from rayembed.losses.candidates import Rows, num_repeated
from rayembed.models.attention.unpadded import packs
from rayembed.models.contract import EmbeddingModel, cost
from rayembed.models.passes.micro_batches import (
    collate,
    cut_for,
    padded_tokens,
    places_in_row_order,
)
from rayembed.training.contrastive.batch_loss import Targets, rows_of
from rayembed.training.contrastive.context import CollatedContext, collate_context, context_rows


class Needed(NamedTuple):
    """Numbers of a worker's passes; those of a step are the largest of all workers."""

    passes: int
    context_passes: int
    tokens: int
    """Padded tokens of all passes, those over the context included."""
    tokens_of_pass: int
    """Padded tokens of the largest pass."""


@dataclass(frozen=True)
class CollatedStep:
    """A batch with its micro-batches on the CPU, in pinned memory where a GPU takes them.

    All that a device gets of it is made here, so that no copy is waited for in the step.
    """

    batch: StepBatch
    rows: Rows
    targets: Targets
    repeated: int
    """Columns whose text stands in several, were this worker the only one."""
    places: Tensor
    """(U,) int64 index of each text in the concatenated outputs of the micro-batches."""
    counts: Tensor
    """(3,) float64: texts, their tokens with those that the model adds, and padding besides; none
    of the context's."""
    needed: Needed
    needed_by_all: Tensor
    """The same as (4,) int64, of which workers take the largest."""
    micro_batches: list[dict[str, Tensor]]
    filler: dict[str, Tensor]
    """A micro-batch of one text, for a worker that has fewer of them than others."""
    context: CollatedContext | None

    @property
    def step(self) -> int:
        """Number of the batch's step, from 0."""
        return self.batch.step

    def filled(self, num_passes: int) -> list[dict[str, Tensor]]:
        """The micro-batches, and fillers up to the number of passes."""
        return self.micro_batches + [self.filler] * (num_passes - len(self.micro_batches))


def collated(
    model: EmbeddingModel,
    batch: StepBatch,
    stage: StageConfig,
    *,
    budget: int,
    pass_cost: int,
    seed: int,
    pinned: bool,
) -> CollatedStep:
    """Cut and collate a batch.

    Args:
        budget: padded tokens of a micro-batch.
        pass_cost: what a forward pass costs beside its tokens, in tokens.
        seed: of the draw of the context's documents.
        pinned: whether micro-batches are put into memory that a GPU copies from by itself.
    """
    costs = [cost(tokens) + model.added_tokens for tokens in batch.tokens]
    cuts = cut_for(model, costs, budget, pass_cost)
    occurrences = batch.occurrences()
    held = Tensor.pin_memory if pinned else _as_it_is

    def ready(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: held(value) for name, value in tensors.items()}

    def micro_batch(cut: list[int]) -> dict[str, Tensor]:
        made = collate(model, batch.tokens, cut)
        made |= model.known_ahead(made)
        return ready(made | {"occurrences": torch.from_numpy(occurrences[np.array(cut)])})

    context = None
    if model.uses_context:
        documents = [batch.tokens[place] for place in batch.positive]
        rows = context_rows(
            world_size() * len(documents),
            model.max_context,
            seed=seed,
            stage=stage.name,
            step=batch.step,
        )
        cut = partial(cut_for, model, budget=budget, pass_cost=pass_cost)
        context = collate_context(model, documents, rows, cut, ready)
    micro_batches = [micro_batch(cut) for cut in cuts]
    passes = [*micro_batches, *([] if context is None else context.micro_batches)]
    tokens = [one["input_ids"].numel() for one in passes]
    needed = Needed(len(cuts), len(passes) - len(cuts), sum(tokens), max(tokens))
    padded = padded_tokens(costs, cuts, packed=packs(model))
    cpu = torch.device("cpu")
    hashes = rows_of(batch, cpu)
    return CollatedStep(
        batch=batch,
        rows=hashes.each(held),
        targets=Targets.of(batch, cpu, stage.loss.needs).each(lambda _, value: held(value)),
        repeated=int(num_repeated(hashes)),
        places=held(places_in_row_order(cuts)),
        counts=held(torch.tensor([len(costs), sum(costs), padded], dtype=torch.float64)),
        needed=needed,
        needed_by_all=held(torch.tensor(needed)),
        micro_batches=micro_batches,
        filler=micro_batch([cuts[-1][-1]]),
        context=context,
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor

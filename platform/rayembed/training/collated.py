"""A worker's batch as its step takes it: cut into micro-batches and collated, ahead of the step.

It needs nothing of the other workers, so that a thread makes it while the step before computes.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import world_size
from rayembed.models.contract import EmbeddingModel, cost
from rayembed.models.contract import pinned as in_pinned_memory
from rayembed.models.micro_batches import collate, cut_for
from rayembed.training.context import CollatedContext, collate_context, context_rows


@dataclass(frozen=True)
class CollatedStep:
    """A batch with its micro-batches on the CPU, in pinned memory where a GPU takes them."""

    batch: StepBatch
    costs: list[int]
    """(U) tokens of each text, with those that the model adds."""
    cuts: list[list[int]]
    """Places of the texts in each micro-batch."""
    micro_batches: list[dict[str, Tensor]]
    filler: dict[str, Tensor]
    """A micro-batch of one text, for a worker that has fewer of them than others."""
    context: CollatedContext | None

    @property
    def step(self) -> int:
        """Number of the batch's step, from 0."""
        return self.batch.step

    @property
    def num_tokens(self) -> int:
        """Padded tokens of this worker's passes, those over the context included."""
        return sum(self._tokens())

    @property
    def most_tokens(self) -> int:
        """Padded tokens of this worker's largest pass."""
        return max(self._tokens())

    def _tokens(self) -> list[int]:
        context = [] if self.context is None else self.context.micro_batches
        return [batch["input_ids"].numel() for batch in [*self.micro_batches, *context]]

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
    ready = in_pinned_memory if pinned else _as_it_is

    def micro_batch(cut: list[int]) -> dict[str, Tensor]:
        made = collate(model, batch.tokens, cut)
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
    return CollatedStep(
        batch=batch,
        costs=costs,
        cuts=cuts,
        micro_batches=[micro_batch(cut) for cut in cuts],
        filler=micro_batch([cuts[-1][-1]]),
        context=context,
    )


def _as_it_is(micro_batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return micro_batch

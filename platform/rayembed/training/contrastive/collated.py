"""Split a worker's batch into micro-batches and collate them, before the step needs them.

It needs nothing of the other workers, so that a thread makes it while the step before computes.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import rank, world_size
from rayembed.distributed.grad_cache import ContextPasses
from rayembed.errors import DataError
from rayembed.losses.candidates import Rows, num_repeated
from rayembed.models.attention.unpadded import packs
from rayembed.models.contract import EmbeddingModel, Tokens, cost, moved
from rayembed.models.passes.micro_batches import (
    collate,
    cut_for,
    padded_tokens,
    places_in_row_order,
)
from rayembed.training.contrastive.batch_loss import Targets, rows_of
from rayembed.training.objective import StepSettings


def context_rows(
    num_rows: int, max_context: int | None, *, seed: int, stage: str, step: int
) -> np.ndarray:
    """Draw (n,) int64 rows of the global batch whose positives serve as context documents, in
    random order.

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
    """Micro-batches of this worker's share of a step's context documents, on the CPU."""

    micro_batches: list[dict[str, Tensor]]
    filler: dict[str, Tensor]
    """One document, for a worker that has fewer passes than others."""
    arrange: Tensor
    num_rows: int
    order: Tensor
    """These three as in `ContextPasses`."""

    @property
    def num_passes(self) -> int:
        """Number of micro-batches of context documents on this worker."""
        return len(self.micro_batches)

    def passes(
        self, embed: Callable[[dict[str, Tensor]], Tensor], num_passes: int, device: torch.device
    ) -> ContextPasses:
        """Make the forward passes over the context documents, with dummy ones added up to the
        largest number of any worker.
        """
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
    """Collate this worker's context documents into micro-batches.

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


class Needed(NamedTuple):
    """Number of forward passes and tokens that a worker's batch needs; each step uses the maximum
    over workers.
    """

    passes: int
    context_passes: int
    tokens: int
    """Padded tokens of all passes, the context's included."""
    tokens_of_pass: int
    """Padded tokens of the largest pass."""


@dataclass(frozen=True)
class CollatedStep:
    """A batch with its micro-batches on the CPU, in pinned memory if they go to a GPU.

    All that a device gets of it is made here, so that no copy is waited for in the step.
    """

    batch: StepBatch
    rows: Rows
    targets: Targets
    repeated: int
    """Number of candidate columns that repeat a text, counted on this worker alone."""
    places: Tensor
    """(U,) int64 index of each text in the concatenated outputs of the micro-batches."""
    counts: Tensor
    """(3,) float64: texts, their tokens with special tokens, padding; without the context's."""
    needed: Needed
    needed_by_all: Tensor
    """`needed` as (4,) int64, reduced over workers by the maximum."""
    micro_batches: list[dict[str, Tensor]]
    filler: dict[str, Tensor]
    """A micro-batch of one text, for a worker that has fewer micro-batches than others."""
    context: CollatedContext | None

    @property
    def step(self) -> int:
        """Number of the step that the batch belongs to, from 0."""
        return self.batch.step

    def filled(self, num_passes: int) -> list[dict[str, Tensor]]:
        """Return the micro-batches, with dummy ones added up to `num_passes`."""
        return self.micro_batches + [self.filler] * (num_passes - len(self.micro_batches))


def collated_step(
    model: EmbeddingModel, batch: StepBatch, stage: StageConfig, settings: StepSettings
) -> CollatedStep:
    """Split and collate a batch for `run_step`; another thread may call this."""
    budget, pass_cost = settings.micro_batch_tokens, settings.pass_cost_tokens
    costs = [cost(tokens) + model.added_tokens for tokens in batch.tokens]
    cuts = cut_for(model, costs, budget, pass_cost)
    occurrences = batch.occurrences()
    held = Tensor.pin_memory if settings.pins else _as_it_is

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
            seed=settings.seed,
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
        targets=Targets.of(batch, cpu).each(held),
        repeated=int(num_repeated(hashes)),
        places=held(places_in_row_order(cuts)),
        counts=held(torch.tensor([len(costs), sum(costs), padded], dtype=torch.float64)),
        needed=needed,
        needed_by_all=held(torch.tensor(needed)),
        micro_batches=micro_batches,
        filler=micro_batch([cuts[-1][-1]]),
        context=context,
    )


def check_rows(batch: StepBatch, stage: StageConfig) -> None:
    """Check that the rows have the labels and scores that the loss needs.

    Raises:
        DataError: one has no graded similarity, or there are no vectors of the stage's teachers.
    """
    found, teachers = len(batch.teacher_vectors), len(stage.teachers)
    if "teacher_vectors" in stage.loss.needs and found != teachers:
        raise DataError(
            f"stage {stage.name!r}: step {batch.step} has vectors of {found} teachers, but "
            f"the loss {stage.loss.kind!r} needs vectors of the stage's {teachers} "
            "teachers; prepare the stage's batch plan again"
        )
    if "similarity" not in stage.loss.needs:
        return
    without = [batch.dataset[row] for row in np.flatnonzero(np.isnan(batch.similarity))]
    if not without:
        return
    raise DataError(
        f"stage {stage.name!r}: the loss {stage.loss.kind!r} needs a graded similarity for "
        f"each row, but {len(without)} of this worker's {len(batch.dataset)} rows of step "
        f"{batch.step} have none; they are from the data sets "
        f"{', '.join(sorted(set(without)))}. Remove these data sets from the stage's "
        "datasets, or use another loss."
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor

"""Compute the loss of one step from this worker's embeddings and the row data of all
workers.

b rows of this worker, K negatives a row, U distinct texts of this worker, N candidates of all
workers, D embedding width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import gather, gather_with_gradient, rank, world_size
from rayembed.errors import DataError
from rayembed.losses.candidates import (
    Columns,
    Rows,
    above_positive,
    batch_candidates,
    batch_documents,
    own_candidates,
    own_documents,
    own_places,
)
from rayembed.losses.contract import (
    Candidates,
    Contrastive,
    Pairwise,
    TeacherScores,
    TeacherVectors,
)
from rayembed.losses.spread_out import product_sums, spread_out
from rayembed.losses.straight_through import View, seen, views_of
from rayembed.machine.hardware import free_memory, total_memory
from rayembed.models.contract import moved

_BLOCK = 1 << 23
"""Maximum pairs of row and candidate computed at a time, on GPUs without the memory for more."""

_PAIR_BYTES = 64
"""Bytes that masks and loss take for a pair: 17 with InfoNCE, 66 with the relations of two teachers
(benchmarks/log)."""

_SHARE_OF_MEMORY, _SHARE_OF_FREE = 1 / 16, 1 / 4
"""Shares of a GPU's memory, and of what is free of it, that a block may take: the smaller one."""


@dataclass(frozen=True)
class Targets:
    """Inputs of the loss for each row: indices into the worker's distinct texts, known
    non-negatives, and scores or vectors of teachers.
    """

    query: Tensor
    positive: Tensor
    negatives: Tensor
    not_negatives: Tensor
    similarity: Tensor
    positive_score: Tensor
    negative_score: Tensor
    teacher_vectors: tuple[Tensor, ...] = ()
    columns: Columns | None = None
    """Candidates of all workers; None: the loss computes them, and the host waits for it."""

    @classmethod
    def of(cls, batch: StepBatch, device: torch.device) -> "Targets":
        """Make the targets of a batch, and move them to a device, asynchronously from pinned
        memory.
        """
        tensor = torch.from_numpy
        return cls(
            tensor(batch.query),
            tensor(batch.positive),
            tensor(batch.negatives),
            tensor(batch.not_negative_hash),
            tensor(batch.similarity),
            tensor(batch.positive_score),
            tensor(batch.negative_score),
            tuple(map(tensor, batch.teacher_vectors)),
        ).each(partial(moved, device=device))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Targets":
        """Apply a function to every tensor except the candidate columns."""
        made: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        vectors = tuple(map(change, self.teacher_vectors))
        return replace(self, **made, teacher_vectors=vectors)


def contrastive_loss(
    embeddings: Tensor,
    rows: Rows,
    targets: Targets,
    stage: StageConfig,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Compute the mean loss of this worker's rows, with the documents of all workers as
    candidates.

    Summed over the widths and number types of the stage's loss, the full one in float32 first.

    Args:
        embeddings: (U, D) unit length, of this worker's distinct texts.
        parameters: values of the loss's parameters by name.

    Raises:
        ConfigError: a width is not below D.
    """
    assert isinstance(stage.loss, Contrastive)
    loss, width = stage.loss, embeddings.shape[1]
    stage.check_widths(width)
    not_negatives = targets.not_negatives
    masked = loss.false_negatives
    if masked is not None and masked.by == "mining":
        above = above_positive(
            rows.negatives,
            targets.negative_score,
            targets.positive_score,
            masked.margin,
        )
        not_negatives = torch.cat([not_negatives, above], dim=1)
    documents = torch.cat([targets.positive.unsqueeze(1), targets.negatives], dim=1)
    scores = torch.cat([targets.positive_score.unsqueeze(1), targets.negative_score], dim=1)
    # A missing negative takes any vector's place; the mask keeps it out of the loss.
    candidates = embeddings[documents.clamp(min=0)]
    queries = embeddings[targets.query]
    num_rows, num_negatives = targets.negatives.shape
    in_batch = stage.batch.in_batch_negatives
    if in_batch:
        first_row = rank() * num_rows
        local = _by_column(candidates)
        columns = targets.columns or Columns.of(gathered(rows), num_rows)
        places = own_places(num_rows, first_row, num_negatives, embeddings.device)
        candidates = gather_with_gradient(local)
        taught = [gather(_by_column(v[documents.clamp(min=0)])) for v in targets.teacher_vectors]
    else:
        taught = [v[documents.clamp(min=0)] for v in targets.teacher_vectors]
        places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    views = views_of(loss, width)
    spread = [View(d, "float32") for d in (width, *loss.dimensions)] if loss.spread_out else []

    def of_block(block: slice) -> tuple[Tensor, ...]:
        """Compute the rows' loss at each width and number type, and the sums of similarities that
        the spread-out term needs.
        """
        some = rows.each(lambda values: values[block])
        if in_batch:
            first = first_row + block.start
            mask = batch_candidates(some, not_negatives[block], columns, first)
        else:
            mask = own_candidates(some, not_negatives[block])
        theirs = candidates if in_batch else candidates[block]
        teacher = vectors = None
        if "teacher_scores" in loss.needs:
            teacher = TeacherScores(places[block], scores[block])
        if "teacher_vectors" in loss.needs:
            vectors = TeacherVectors(
                tuple(v[targets.query[block]] for v in targets.teacher_vectors),
                tuple(v if in_batch else v[block] for v in taught),
                places[block],
                documents[block] >= 0,
                batch_documents(some, columns, first) if in_batch else own_documents(some),
            )
            if masked is not None and masked.by == "teachers":
                mask = mask & ~_above_positive(vectors, masked.margin)

        def among(view: View) -> Candidates:
            return Candidates(seen(theirs, view), places[block, 0], mask, teacher, vectors)

        return (
            *(loss.of_rows(seen(queries[block], view), among(view), parameters) for view in views),
            *(product_sums(seen(queries[block], view), among(view)) for view in spread),
        )

    found = in_row_blocks(
        of_block,
        num_rows,
        len(candidates) if in_batch else 1,
        loss.row_blocks,
        embeddings.device,
    )
    losses, sums = found[: len(views)], found[len(views) :]
    total = torch.stack([of_rows.mean() for of_rows in losses]).sum()
    for of_width, view in zip(sums, spread, strict=True):
        total = total + loss.spread_out * spread_out(of_width, view.width)
    return total


def _by_column(documents: Tensor) -> Tensor:
    """Reorder the rows' documents (b, 1 + K, D) to (b·(1 + K), D): all positives, then all
    negatives.
    """
    return torch.cat([documents[:, 0], documents[:, 1:].flatten(0, 1)])


def _above_positive(vectors: TeacherVectors, margin: float) -> Tensor:
    """(b, N) bool, true where a teacher rates a candidate above the row's positive by more than the
    margin.
    """
    positive = vectors.places_BM[:, :1]
    above = [cosines > cosines.gather(1, positive) + margin for cosines in vectors.cosines]
    # Of a margin below 0 the positive itself would be among them.
    return torch.stack(above).any(dim=0).scatter(1, positive, False)


def in_row_blocks(
    of_block: Callable[[slice], tuple[Tensor, ...]],
    num_rows: int,
    num_candidates: int,
    cut: bool,
    device: torch.device,
) -> list[Tensor]:
    """Apply `of_block` to all rows, in blocks that fit into memory; if there are several, the
    backward pass recomputes them.

    Args:
        cut: whether the rows may be computed in blocks.
        device: whose memory bounds a block.
    """
    pairs = num_rows * num_candidates
    # Each block reads the vectors of all candidates: a GPU with room takes few large ones.
    if cut and pairs > _BLOCK and device.type == "cuda":
        total = total_memory()
        # What is free differs from start to start, and kernels add up by the number of rows.
        free = total if torch.are_deterministic_algorithms_enabled() else free_memory("cuda")
        rows = pairs_that_fit(total, free) // num_candidates
    else:
        rows = _BLOCK // max(num_candidates, 1)
    rows = max(1, rows)
    if not cut or num_rows <= rows:
        return list(of_block(slice(0, num_rows)))
    blocks = [
        checkpoint(
            of_block, slice(start, start + rows), use_reentrant=False, preserve_rng_state=False
        )
        for start in range(0, num_rows, rows)
    ]
    return [torch.cat(parts) for parts in zip(*blocks, strict=True)]


def pairs_that_fit(total: int, free: int) -> int:
    """Return how many pairs of row and candidate a GPU may compute at a time.

    A power of two, so that it is seldom another one for what happens to be free.

    Args:
        total: bytes of the GPU.
        free: bytes that are free of them.
    """
    pairs = int(min(_SHARE_OF_MEMORY * total, _SHARE_OF_FREE * free) / _PAIR_BYTES)
    return max(_BLOCK, 1 << max(0, pairs.bit_length() - 1))


def pairwise_loss(
    embeddings: Tensor,
    rows: Rows,
    targets: Targets,
    stage: StageConfig,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Compute the loss of text pairs with graded similarity over all workers; every worker gets the
    same result.

    Arguments and errors as of `contrastive_loss`.
    """
    assert isinstance(stage.loss, Pairwise)
    loss, width = stage.loss, embeddings.shape[1]
    stage.check_widths(width)
    queries = gather_with_gradient(embeddings[targets.query])
    documents = gather_with_gradient(embeddings[targets.positive])
    similarity = gather(targets.similarity)
    of_view = [
        loss.of_pairs(seen(queries, view), seen(documents, view), similarity, parameters)
        for view in views_of(loss, width)
    ]
    return torch.stack(of_view).sum()


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


def rows_of(batch: StepBatch, device: torch.device) -> Rows:
    """Collect hashes of the rows' texts and labels, from which candidate masks of a batch are
    computed.
    """
    tensor = torch.from_numpy
    return Rows(
        query=tensor(batch.query_hash),
        positive=tensor(batch.positive_hash),
        negatives=tensor(batch.negative_hash),
        label=tensor(batch.label_hash),
        in_batch=tensor(batch.in_batch),
    ).each(partial(moved, device=device))


def gathered(rows: Rows) -> Rows:
    """Gather the row data of all workers in rank order, in one message."""
    if world_size() == 1:
        return rows
    single = [rows.query, rows.positive, rows.label, rows.in_batch.long()]
    everything = gather(torch.cat([torch.stack(single, dim=1), rows.negatives], dim=1))
    query, positive, label, in_batch = everything[:, :4].T.contiguous()
    return Rows(query, positive, everything[:, 4:].contiguous(), label, in_batch.bool())

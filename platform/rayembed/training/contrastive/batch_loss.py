"""Compute the loss of one step from this worker's embeddings and the row data of all
workers.

b rows of this worker, K negatives a row, U distinct texts of this worker, N candidates of all
workers, D embedding width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import gather, gather_with_gradient, rank, world_size
from rayembed.losses.candidates import (
    Columns,
    Rows,
    above_positive,
    batch_candidates,
    batch_documents,
    hard_negatives,
    own_candidates,
    own_documents,
    own_places,
)
from rayembed.losses.contract import (
    Candidates,
    Contrastive,
    FurtherNegatives,
    FurtherPositives,
    Pairwise,
    TeacherScores,
    TeacherVectors,
    similarities,
)
from rayembed.losses.spread_out import product_sums, spread_out
from rayembed.losses.straight_through import View, seen, views_of
from rayembed.machine.hardware import free_memory, total_memory
from rayembed.models.contract import moved
from rayembed.training.contrastive.directions import OtherRows, not_above

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
    further_positives: Tensor
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
            tensor(batch.further_positives),
            tuple(map(tensor, batch.teacher_vectors)),
        ).each(partial(moved, device=device))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Targets":
        """Apply a function to every tensor except the candidate columns."""
        made: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        vectors = tuple(map(change, self.teacher_vectors))
        return replace(self, **made, teacher_vectors=vectors)


@dataclass(frozen=True)
class _Compared:
    """A step's rows and the documents with which they are compared, at full width."""

    loss: Contrastive
    rows: Rows
    targets: Targets
    not_negatives: Tensor
    """(b, P) hashes of all texts that are no negatives of each query."""
    documents: Tensor
    """(b, 1 + K) indices of each row's positive and negatives among the worker's texts."""
    queries: Tensor
    """(b, D)"""
    positives: Tensor
    """(b, D) of the first positives."""
    further_positives: Tensor | None
    """(b, P, D); None: no row has any."""
    vectors: Tensor
    """(N, D) of all workers' documents, or (b, 1 + K, D) of each row's own."""
    places: Tensor
    """(b, 1 + K) indices of the row's documents among the candidates."""
    taught: list[Tensor]
    """Teachers' vectors of the same documents."""
    first_row: int = 0
    columns: Columns | None = None
    """Documents of all workers; None: rows have their own documents alone."""
    others: OtherRows | None = None

    @classmethod
    def of(
        cls, embeddings: Tensor, rows: Rows, targets: Targets, loss: Contrastive, in_batch: bool
    ) -> "_Compared":
        """Gather the documents of all workers, if rows are compared with each other's."""
        not_negatives, masked = targets.not_negatives, loss.false_negatives
        if masked is not None and masked.by == "mining":
            above = above_positive(
                rows.negatives,
                targets.negative_score,
                targets.positive_score,
                masked.margin,
            )
            not_negatives = torch.cat([not_negatives, above], dim=1)
        documents = torch.cat([targets.positive.unsqueeze(1), targets.negatives], dim=1)
        # A missing negative takes any vector's place; the mask keeps it out of the loss.
        vectors = embeddings[documents.clamp(min=0)]
        taught = [v[documents.clamp(min=0)] for v in targets.teacher_vectors]
        more, queries = targets.further_positives, embeddings[targets.query]
        further = embeddings[more.clamp(min=0)] if more.shape[1] else None
        own = queries, vectors[:, 0], further
        made = partial(cls, loss, rows, targets, not_negatives, documents, *own)
        if not in_batch:
            places = torch.arange(documents.shape[1], device=documents.device)
            return made(vectors, places.expand_as(documents), taught)
        num_rows, num_negatives = targets.negatives.shape
        first_row = rank() * num_rows
        columns = targets.columns or Columns.of(gathered(rows), num_rows)
        others = None
        if loss.further_directions:
            others = OtherRows.of(gathered(rows), not_negatives, queries, columns)
        return made(
            gather_with_gradient(_by_column(vectors)),
            own_places(num_rows, first_row, num_negatives, embeddings.device),
            [gather(_by_column(v)) for v in taught],
            first_row,
            columns,
            others,
        )

    def candidates(self, block: slice) -> Candidates:
        """Candidates of the rows of a block, with what else their loss reads."""
        loss, places, columns = self.loss, self.places[block], self.columns
        rows = self.rows.each(lambda values: values[block])
        not_negatives, first = self.not_negatives[block], self.first_row + block.start
        if columns is not None:
            mask = batch_candidates(rows, not_negatives, columns, first)
        else:
            mask = own_candidates(rows, not_negatives)
        theirs = self.vectors if columns is not None else self.vectors[block]
        further: list[FurtherNegatives] = []
        if self.others is not None:
            own = self.queries[block], self.positives[block], theirs
            further = self.others.negatives(
                loss.further_directions, rows, not_negatives, first, *own
            )
        teacher = vectors = hard = None
        if loss.marks_hard_negatives:
            hard = torch.ones_like(mask) if columns is None else hard_negatives(rows, columns)
        if "teacher_scores" in loss.needs:
            targets = self.targets
            positive = targets.positive_score[block].unsqueeze(1)
            scores = torch.cat([positive, targets.negative_score[block]], dim=1)
            teacher = TeacherScores(places, scores)
        masked = loss.false_negatives
        if "teacher_vectors" in loss.needs:
            vectors = self._vectors_of_teachers(block, rows, first)
            if masked is not None and masked.by == "teachers":
                mask = mask & ~_above_positive(vectors, masked.margin)
        if masked is not None and masked.by == "own":
            cosines = similarities(self.queries[block].detach(), theirs.detach())
            limit = cosines.gather(1, places[:, :1]) + masked.margin
            mask = mask & (cosines <= limit).scatter(1, places[:, :1], True)
            further = [not_above(one, limit) for one in further]
        positives = None
        if self.further_positives is not None:
            there = self.targets.further_positives[block] >= 0
            positives = FurtherPositives(self.further_positives[block], there)
        read = teacher, vectors, hard, tuple(further), positives
        return Candidates(theirs, places[:, 0], mask, *read)

    def _vectors_of_teachers(self, block: slice, rows: Rows, first: int) -> TeacherVectors:
        columns = self.columns
        return TeacherVectors(
            tuple(v[self.targets.query[block]] for v in self.targets.teacher_vectors),
            tuple(v[block] if columns is None else v for v in self.taught),
            self.places[block],
            self.documents[block] >= 0,
            own_documents(rows) if columns is None else batch_documents(rows, columns, first),
        )


def _seen_candidates(candidates: Candidates, view: View) -> Candidates:
    """Convert all vectors of the model to the form of a view."""
    further = [
        replace(one, anchors_BD=seen(one.anchors_BD, view), others_ND=seen(one.others_ND, view))
        for one in candidates.further
    ]
    positives = candidates.further_positives
    if positives is not None:
        positives = replace(positives, vectors_BPD=seen(positives.vectors_BPD, view))
    return replace(
        candidates,
        vectors=seen(candidates.vectors, view),
        further=tuple(further),
        further_positives=positives,
    )


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
    in_batch = stage.batch.in_batch_negatives
    batch = _Compared.of(embeddings, rows, targets, loss, in_batch)
    views = views_of(loss, width)
    spread = [View(d, "float32") for d in (width, *loss.dimensions)] if loss.spread_out else []

    def of_block(block: slice) -> tuple[Tensor, ...]:
        """Compute the rows' loss at each width and number type, and the sums of similarities that
        the spread-out term needs.
        """
        queries, among = batch.queries[block], batch.candidates(block)
        return (
            *(
                loss.of_rows(seen(queries, v), _seen_candidates(among, v), parameters)
                for v in views
            ),
            *(product_sums(seen(queries, v), _seen_candidates(among, v)) for v in spread),
        )

    found = in_row_blocks(
        of_block,
        len(batch.queries),
        len(batch.vectors) if in_batch else 1,
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

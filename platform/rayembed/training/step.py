"""One training step: tokens → embeddings → candidates of all workers → loss → gradients.

b rows of this worker, K negatives a row, U distinct texts of this worker, D embedding width.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rayembed.config.loss import LossConfig
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import (
    gather,
    gather_with_gradient,
    largest,
    rank,
    sum_with_gradient,
    sums_of,
    world_size,
)
from rayembed.distributed.grad_cache import (
    Backward,
    ContextPasses,
    Passes,
    backward_in_one_graph,
    backward_with_cache,
)
from rayembed.errors import DataError
from rayembed.losses.candidates import (
    Rows,
    above_positive,
    batch_candidates,
    own_candidates,
    own_places,
)
from rayembed.losses.contract import Candidates, Contrastive, Pairwise, TeacherScores
from rayembed.losses.matryoshka import cut
from rayembed.models.contract import EmbeddingModel, EmbedOutput, cost, to_device
from rayembed.models.micro_batches import (
    collate,
    cut_by_length,
    padded_tokens,
    places_in_row_order,
)
from rayembed.training.context import context_passes, context_rows
from rayembed.training.dropped import without_gradient_unless_finite
from rayembed.training.loss_parameters import LossParameters, metrics_of, named_values


@dataclass(frozen=True)
class StepSettings:
    """Execution settings of a step on this worker; only the seed affects results."""

    micro_batch_tokens: int
    grad_cache: bool
    device: torch.device
    _: KW_ONLY
    pass_cost_tokens: int = 48
    """Cost of a forward pass beside its tokens, in tokens; see `hardware.pass_cost_tokens`."""
    seed: int = 0
    """Seed of draws from a global batch, the same on all workers."""


@dataclass(frozen=True)
class StepReport:
    """Outcome of one step over all workers."""

    loss: float
    """Mean over workers."""
    texts: int
    """Sum of the workers' distinct texts."""
    tokens: int
    padded_tokens: int
    micro_batches: int
    """Maximum over workers."""
    metrics: dict[str, float]
    """Model statistics of the global batch."""


def run_step(
    model: EmbeddingModel,
    engine: nn.Module,
    backward: Backward,
    batch: StepBatch,
    stage: StageConfig,
    settings: StepSettings,
) -> StepReport:
    """Accumulate the gradients of the stage's loss for one step in the model's parameters.

    Args:
        model: says how tokens are collated and whether there are a context and an auxiliary loss.
        engine: `EngineModule(model)`, or what wraps it.
        backward: sends one scalar's gradient through its graph.
    """
    lengths = [cost(tokens) for tokens in batch.tokens]
    costs = [length + model.added_tokens for length in lengths]
    cuts = cut_by_length(costs, settings.micro_batch_tokens, settings.pass_cost_tokens)
    # Engines that partition communicate in every pass: all workers need the same number.
    num_passes = largest(len(cuts), settings.device)
    filled = cuts + [[cuts[-1][-1]]] * (num_passes - len(cuts))
    places = places_in_row_order(cuts).to(settings.device)

    def embed(micro: dict[str, Tensor], context: Tensor | None) -> EmbedOutput:
        output: EmbedOutput = engine(to_device(micro, settings.device), context)
        return output

    occurrences = batch.occurrences()
    passes = Passes(
        embed=embed,
        micro_batches=[
            collate(model, batch.tokens, cut)
            | {"occurrences": torch.from_numpy(occurrences[np.array(cut)])}
            for cut in filled
        ],
        num_fillers=num_passes - len(cuts),
        context=_context_passes(model, engine, batch, stage, settings),
        loss_parameters=_loss_parameters(engine, stage.loss),
    )
    _check_rows(batch, stage)
    rows = _rows(batch, settings.device)
    targets = _Targets.of(batch, settings.device, stage.loss.needs)
    metrics: dict[str, float] = {}

    def loss_of(
        embeddings: Tensor, statistics: Tensor | None, values: Tensor | None = None
    ) -> Tensor:
        parameters = {} if values is None else named_values(stage.loss, values)
        metrics.update(metrics_of(parameters))
        of_stage = contrastive_loss if stage.loss.takes_candidates else pairwise_loss
        loss = of_stage(embeddings[places], rows, targets, stage, parameters)
        if statistics is not None:
            total = sum_with_gradient(statistics)
            loss = loss + model.auxiliary_loss(total)
            metrics.update(model.statistics_metrics(total.detach()))
        return without_gradient_unless_finite(loss)

    method = backward_with_cache if settings.grad_cache else backward_in_one_graph
    if num_passes == 1 and not model.uses_context:
        method = backward_in_one_graph  # one graph is all that the cache would keep
    loss = method(passes, loss_of, backward)
    mine = (float(loss.detach()), len(lengths), sum(costs), padded_tokens(costs, cuts))
    total_loss, texts, tokens, padded = sums_of(mine, settings.device)
    return StepReport(
        loss=total_loss / world_size(),
        texts=int(texts),
        tokens=int(tokens),
        padded_tokens=int(padded),
        micro_batches=num_passes,
        metrics=metrics,
    )


@dataclass(frozen=True)
class _Targets:
    """Indices of each row's texts in the worker's distinct texts, its known non-negatives, and what
    a teacher or a person says of its texts.
    """

    query: Tensor
    positive: Tensor
    negatives: Tensor
    not_negatives: Tensor
    similarity: Tensor
    positive_score: Tensor
    negative_score: Tensor

    @classmethod
    def of(cls, batch: StepBatch, device: torch.device, needs: Collection[str] = ()) -> "_Targets":
        def tensor(array: np.ndarray, wanted: bool = True) -> Tensor:
            there = torch.from_numpy(array)
            return there.to(device) if wanted else there  # a device gets only what is read

        return cls(
            tensor(batch.query),
            tensor(batch.positive),
            tensor(batch.negatives),
            tensor(batch.not_negative_hash),
            tensor(batch.similarity, "similarity" in needs),
            tensor(batch.positive_score, "teacher_scores" in needs),
            tensor(batch.negative_score, "teacher_scores" in needs),
        )


def contrastive_loss(
    embeddings: Tensor,
    rows: Rows,
    targets: _Targets,
    stage: StageConfig,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Mean loss of this worker's rows over the candidates of all workers.

    Summed over the widths of the stage's loss, the full one first.

    Args:
        embeddings: (U, D) unit length, of this worker's distinct texts.
        parameters: values of the loss's parameters by name.

    Raises:
        ConfigError: a width is not below D.
    """
    assert isinstance(stage.loss, Contrastive)
    loss, width = stage.loss, embeddings.shape[1]
    stage.check_widths(width)
    queries = embeddings[targets.query]
    not_negatives = targets.not_negatives
    if loss.false_negatives is not None:
        above = above_positive(
            rows.negatives,
            targets.negative_score,
            targets.positive_score,
            loss.false_negatives.margin,
        )
        not_negatives = torch.cat([not_negatives, above], dim=1)
    documents = torch.cat([targets.positive.unsqueeze(1), targets.negatives], dim=1)
    # A missing negative takes any vector's place; the mask keeps it out of the loss.
    candidates = embeddings[documents.clamp(min=0)]
    if not stage.batch.in_batch_negatives:
        mask = own_candidates(rows, not_negatives)
        places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    else:
        num_rows, num_negatives = targets.negatives.shape
        first_row = rank() * num_rows
        local = torch.cat([candidates[:, 0], candidates[:, 1:].flatten(0, 1)])
        everyone = Rows(**{name: gather(value) for name, value in vars(rows).items()})
        mask = batch_candidates(rows, not_negatives, everyone, first_row, num_rows)
        places = own_places(num_rows, first_row, num_negatives, embeddings.device)
        candidates = gather_with_gradient(local)
    teacher = None
    if "teacher_scores" in loss.needs:
        scores = torch.cat([targets.positive_score.unsqueeze(1), targets.negative_score], dim=1)
        teacher = TeacherScores(places, scores)
    of_width = [
        loss.of_rows(
            cut(queries, d),
            Candidates(cut(candidates, d), places[:, 0], mask, teacher),
            parameters,
        )
        for d in (width, *loss.dimensions)
    ]
    return torch.stack([of_rows.mean() for of_rows in of_width]).sum()


def pairwise_loss(
    embeddings: Tensor,
    rows: Rows,
    targets: _Targets,
    stage: StageConfig,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Loss of the graded pairs of all workers; every worker computes the same.

    Arguments and errors as of `contrastive_loss`.
    """
    assert isinstance(stage.loss, Pairwise)
    loss, width = stage.loss, embeddings.shape[1]
    stage.check_widths(width)
    queries = gather_with_gradient(embeddings[targets.query])
    documents = gather_with_gradient(embeddings[targets.positive])
    similarity = gather(targets.similarity)
    of_width = [
        loss.of_pairs(cut(queries, d), cut(documents, d), similarity, parameters)
        for d in (width, *loss.dimensions)
    ]
    return torch.stack(of_width).sum()


def _check_rows(batch: StepBatch, stage: StageConfig) -> None:
    """Return when the rows have what the loss needs.

    Raises:
        DataError: one has no graded similarity.
    """
    if "similarity" not in stage.loss.needs:
        return
    without = [batch.dataset[row] for row in np.flatnonzero(np.isnan(batch.similarity))]
    if not without:
        return
    raise DataError(
        f"stage {stage.name!r}: {len(without)} of this worker's {len(batch.dataset)} rows of step "
        f"{batch.step} have no graded similarity, which the loss {stage.loss.kind!r} learns from; "
        f"they are of the data sets {', '.join(sorted(set(without)))}. Take these out of the "
        "stage's datasets, or another loss."
    )


def _rows(batch: StepBatch, device: torch.device) -> Rows:
    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Rows(
        query=tensor(batch.query_hash),
        positive=tensor(batch.positive_hash),
        negatives=tensor(batch.negative_hash),
        label=tensor(batch.label_hash),
        in_batch=tensor(batch.in_batch),
    )


def _loss_parameters(engine: nn.Module, loss: LossConfig) -> Callable[[], Tensor] | None:
    if not loss.parameter_names:
        return None

    def values() -> Tensor:
        found: Tensor = engine(None, only_loss=True)
        return found

    return values


class EngineModule(nn.Module):
    """The model as an engine wraps it, with the parameters of the loss if it has any: one forward
    method for texts, for their context and for these parameters.

    All go through the engine's own forward pass, which partitioned parameters need.
    """

    def __init__(self, model: EmbeddingModel, loss: LossConfig | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss: LossParameters | None = None
        if loss is not None and loss.parameter_names:
            self.loss = LossParameters(loss).to(next(model.parameters()).device)

    def forward(
        self,
        inputs: dict[str, Tensor] | None,
        context: Tensor | None = None,
        only_context: bool = False,
        only_loss: bool = False,
    ) -> EmbedOutput | Tensor:
        """Outputs of the model, or only the context vectors of the texts, or only the values of
        the loss's parameters.
        """
        if only_loss:
            assert self.loss is not None
            values: Tensor = self.loss()
            return values
        assert inputs is not None
        if only_context:
            return self.model.embed_context(inputs)
        output: EmbedOutput = self.model(inputs, context)
        return output


def _context_passes(
    model: EmbeddingModel,
    engine: nn.Module,
    batch: StepBatch,
    stage: StageConfig,
    settings: StepSettings,
) -> ContextPasses | None:
    if not model.uses_context:
        return None

    def embed_context(micro: dict[str, Tensor]) -> Tensor:
        vectors: Tensor = engine(to_device(micro, settings.device), only_context=True)
        return vectors

    documents = [batch.tokens[place] for place in batch.positive]
    rows = context_rows(
        world_size() * len(documents),
        model.max_context,
        seed=settings.seed,
        stage=stage.name,
        step=batch.step,
    )
    cut = partial(
        cut_by_length, budget=settings.micro_batch_tokens, pass_cost=settings.pass_cost_tokens
    )
    return context_passes(embed_context, model, documents, rows, cut, settings.device)

"""One training step: tokens → embeddings → candidates of all workers → loss → gradients.

b rows of this worker, K negatives a row, U distinct texts of this worker, D embedding width.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from rayembed.config.loss import LossConfig, Widths
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import (
    maxima,
    read_together,
    sum_with_gradient,
    summed,
    world_size,
)
from rayembed.distributed.grad_cache import (
    Backward,
    Output,
    Passes,
    backward_with_cache,
    backward_with_graphs,
)
from rayembed.losses.candidates import Columns, Rows, num_repeated
from rayembed.models.contract import EmbeddingModel, EmbedOutput, moved, to_device
from rayembed.training.contrastive.batch_loss import (
    check_rows,
    contrastive_loss,
    gathered,
    pairwise_loss,
)
from rayembed.training.contrastive.collated import CollatedStep, Needed, collated
from rayembed.training.contrastive.dropped import without_gradient_unless_finite
from rayembed.training.contrastive.hidden_states import (
    StateErrors,
    auxiliary_loss,
    statistics_metrics,
)
from rayembed.training.contrastive.loss_parameters import (
    LossParameters,
    loss_parameters,
    named_values,
    parameter_shapes,
    scalars_of,
)
from rayembed.training.memory.graph_room import GraphRoom, Tokens


@dataclass(frozen=True)
class StepSettings:
    """Execution settings of a step on this worker; only the seed affects results."""

    micro_batch_tokens: int
    grad_cache: bool | GraphRoom
    """Whether to use GradCache, or what says so of each step."""
    device: torch.device
    _: KW_ONLY
    pass_cost_tokens: int = 48
    """Cost of a forward pass beside its tokens, in tokens; see `hardware.pass_cost_tokens`."""
    seed: int = 0
    """Seed of draws from a global batch, the same on all workers."""

    @property
    def pins(self) -> bool:
        """Whether batches are put into memory that a device copies from by itself."""
        return self.device.type != "cpu"


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
    batch: StepBatch | CollatedStep,
    stage: StageConfig,
    settings: StepSettings,
) -> StepReport:
    """Accumulate the gradients of the stage's loss for one step in the model's parameters.

    Args:
        model: says how tokens are collated and whether there are a context and an auxiliary loss.
        engine: `EngineModule(model)`, or what wraps it.
        backward: sends one scalar's gradient through its graph.
        batch: collated by `collated_step` ahead of the step, or as it is.
    """
    ready = batch
    if not isinstance(ready, CollatedStep):
        ready = collated_step(model, ready, stage, settings)
    batch, device, shared = ready.batch, settings.device, ready.context
    check_rows(batch, stage)
    rows = ready.rows.each(partial(moved, device=device))
    targets = ready.targets.to(device, stage.loss.needs)
    places, counts = moved(ready.places, device), moved(ready.counts, device)
    in_batch = stage.loss.takes_candidates and stage.batch.in_batch_negatives
    everyone = gathered(rows) if in_batch else None
    # Engines that partition communicate in every pass: all workers need the same number.
    needed, repeated = _of_all_workers(ready, everyone, device)
    if everyone is not None:
        columns = Columns.of(everyone, len(batch.query), repeated)
        targets = replace(targets, columns=columns)

    def embed(micro: dict[str, Tensor], context: Tensor | None) -> EmbedOutput:
        output: EmbedOutput = engine(to_device(micro, device), context)
        return output

    def embed_context(micro: dict[str, Tensor]) -> Tensor:
        vectors: Tensor = engine(to_device(micro, device), only_context=True)
        return vectors

    context = None
    if shared is not None:
        context = shared.passes(embed_context, needed.context_passes, device)
    widths = Widths(model.dimensions[0], tuple(v.shape[1] for v in batch.teacher_vectors))
    shapes = parameter_shapes(stage.loss, widths)
    passes = Passes(
        embed=embed,
        micro_batches=ready.filled(needed.passes),
        num_fillers=needed.passes - ready.needed.passes,
        context=context,
        loss_parameters=_loss_parameters(engine) if shapes else None,
    )
    # Read when the step is done: a device is not asked before.
    told: list[Tensor] = []
    scalars: dict[str, Tensor] = {}

    def loss_of(
        embeddings: Tensor, statistics: Tensor | None, values: Tensor | None = None
    ) -> Tensor:
        parameters = {} if values is None else named_values(shapes, values)
        of_stage = contrastive_loss if stage.loss.takes_candidates else pairwise_loss
        loss = of_stage(embeddings[places], rows, targets, stage, parameters)
        if statistics is not None:
            total = sum_with_gradient(statistics)
            loss = loss + auxiliary_loss(model, total, stage.hidden_states)
            told.append(total.detach())
        scalars.update(scalars_of(parameters))
        return without_gradient_unless_finite(loss)

    several = needed.passes > 1 or model.uses_context
    most = Tokens(needed.tokens, needed.tokens_of_pass)
    keeps = _keeps_graphs(settings.grad_cache, passes, most, several=several)
    method = backward_with_graphs if keeps else backward_with_cache
    loss = method(passes, loss_of, backward)
    mine = torch.cat([loss.detach().double().view(1), counts])
    sums, *told = read_together(summed(mine), *told, *scalars.values())
    total_loss, texts, tokens, all_padded = sums.tolist()
    metrics = {name: float(told.pop()) for name in reversed(scalars)}
    if told:
        metrics |= statistics_metrics(model, told.pop(), stage.hidden_states)
    return StepReport(
        loss=total_loss / world_size(),
        texts=int(texts),
        tokens=int(tokens),
        padded_tokens=int(all_padded),
        micro_batches=needed.passes,
        metrics=metrics,
    )


def collated_step(
    model: EmbeddingModel, batch: StepBatch, stage: StageConfig, settings: StepSettings
) -> CollatedStep:
    """The batch in micro-batches, as `run_step` takes it; may be made in another thread."""
    return collated(
        model,
        batch,
        stage,
        budget=settings.micro_batch_tokens,
        pass_cost=settings.pass_cost_tokens,
        seed=settings.seed,
        pinned=settings.pins,
    )


def _of_all_workers(
    ready: CollatedStep, everyone: Rows | None, device: torch.device
) -> tuple[Needed, int]:
    """What the worker with the most needs, and the number of columns that `Columns.of` takes.

    One worker knows them; several are told by their devices, at once.

    Args:
        everyone: rows of all workers; None where no row is a candidate of another's.
    """
    if world_size() == 1:
        return ready.needed, ready.repeated
    asked = [maxima(moved(ready.needed_by_all, device))]
    if everyone is not None:
        asked.append(num_repeated(everyone))
    most, *repeated = read_together(*asked)
    return Needed(*most.tolist()), int(repeated[0]) if repeated else 0


def _keeps_graphs(
    setting: bool | GraphRoom, passes: Passes, tokens: Tokens, *, several: bool
) -> bool:
    """Whether the graphs of a step are kept; else GradCache is used.

    Args:
        several: whether GradCache would keep less than one graph.
    """
    if isinstance(setting, bool):
        return not (setting and several)
    context = [] if passes.context is None else list(passes.context.micro_batches)
    first = passes.micro_batches[0]

    def forward() -> list[Output]:
        shared = None
        if passes.context is not None:
            shared = passes.context.gathered([passes.context.embed(batch) for batch in context])
        return [passes.embed(first, shared)]

    measured = first["input_ids"].numel() + sum(batch["input_ids"].numel() for batch in context)
    return setting.keeps_graphs(forward, measured, tokens, several=several)


def _loss_parameters(engine: nn.Module) -> Callable[[], Tensor]:
    def values() -> Tensor:
        found: Tensor = engine(None, only_loss=True)
        return found

    return values


class EngineModule(nn.Module):
    """The model as an engine wraps it, with the parameters of the loss if it has any: one forward
    method for texts, for their context and for these parameters.

    All go through the engine's own forward pass, which partitioned parameters need.

    Args:
        teachers: widths of the vectors of the stage's teachers.
        states: adds the errors of the model's hidden states to its statistics.

    Raises:
        ConfigError: the loss cannot compare vectors of these widths.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        loss: LossConfig | None = None,
        teachers: tuple[int, ...] = (),
        states: StateErrors | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.states = states
        self.loss: LossParameters | None = None
        if loss is not None:
            found = loss_parameters(loss, Widths(model.dimensions[0], teachers))
            self.loss = None if found is None else found.to(next(model.parameters()).device)

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
        if self.states is not None:
            return self.states(inputs)
        output: EmbedOutput = self.model(inputs, context)
        return output

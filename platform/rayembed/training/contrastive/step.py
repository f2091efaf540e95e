"""The contrastive training objective: one step computes embeddings, candidates, loss and
gradients.

b rows of this worker, K negatives a row, U distinct texts of this worker, D embedding width.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from rayembed.assets.resolver import resolve_model
from rayembed.config.backbone import Dtype
from rayembed.config.loss import Widths
from rayembed.config.stage import StageConfig
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.step_batch import StepBatch
from rayembed.data.plan.stream import PairSteps
from rayembed.data.vectors.lookup import TeacherVectorLookup
from rayembed.distributed.collectives import (
    maxima,
    rank,
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
from rayembed.errors import ConfigError
from rayembed.losses.candidates import Columns, Rows, num_repeated
from rayembed.losses.contract import Contrastive, Pairwise
from rayembed.models.contract import (
    EmbeddingModel,
    EmbedOutput,
    PromptTokenizer,
    Tokenizer,
    TrainingTokenizer,
    moved,
    to_device,
)
from rayembed.models.loading.load import load_model
from rayembed.training.contrastive.batch_loss import (
    contrastive_loss,
    gathered,
    pairwise_loss,
)
from rayembed.training.contrastive.collated import CollatedStep, Needed, check_rows, collated_step
from rayembed.training.contrastive.engine_module import (
    named_values,
    parameter_shapes,
    scalars_of,
)
from rayembed.training.contrastive.hidden_states import (
    auxiliary_loss,
    check_comparable,
    statistics_metrics,
)
from rayembed.training.dropped import without_gradient_unless_finite
from rayembed.training.memory.graph_room import GraphRoom, Tokens
from rayembed.training.objective import Objective, StepReport, StepSettings


def run_step(
    model: EmbeddingModel,
    engine: nn.Module,
    backward: Backward,
    batch: StepBatch | CollatedStep,
    stage: StageConfig,
    settings: StepSettings,
) -> StepReport:
    """Compute one step's loss, and accumulate its gradients in the model's parameters.

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
    targets = ready.targets.each(partial(moved, device=device))
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
        loss_parameters=partial(engine, None, only_loss=True) if shapes else None,
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
    keeps = keeps_graphs(settings.grad_cache, passes, most, several=several)
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


def stage_tokenizer(stage: StageConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer for training, with the text lengths that the stage sets.

    The given one is left as it is.
    """
    read = tokenizer.in_training() if isinstance(tokenizer, TrainingTokenizer) else tokenizer
    wanted = {"query": stage.query_max_length, "document": stage.document_max_length}
    if not any(wanted.values()):
        return read
    changed: PromptTokenizer = copy.copy(read)  # type: ignore[assignment] # all models' are
    changed.max_lengths = {r: wanted[r] or length for r, length in changed.max_lengths.items()}
    return changed


class EmbeddingObjective(Objective):
    """Contrastive objective: moves queries close to their positives and away from other candidates;
    the stage chooses the loss.
    """

    trace = "--trace-batch"
    ahead = staticmethod(collated_step)
    run_step = staticmethod(run_step)

    def check(self, stage: StageConfig) -> None:
        """Check that the stage's loss works on embeddings."""
        if not isinstance(stage.loss, Contrastive | Pairwise):
            raise ConfigError(
                f"stages.{stage.name}.loss.kind is {stage.loss.kind!r}, which does not work "
                "on embeddings, but a loss of this model must; use another loss, such as "
                "infonce"
            )

    def teacher_widths(self, plan: BatchPlan) -> tuple[int, ...]:
        """Return the vector widths of the stage's teachers."""
        return tuple(TeacherVectorLookup.open(folder).width for folder in plan.teachers)

    def teacher(
        self, model: EmbeddingModel, stage: StageConfig, dtype: str
    ) -> EmbeddingModel | None:
        """Load the teacher whose hidden states the student learns; None if the stage sets none."""
        if stage.hidden_states is None:
            return None
        reference = stage.hidden_states.teacher
        teacher = load_model(resolve_model(reference), dtype=cast(Dtype, dtype))
        check_comparable(f"stages.{stage.name}.hidden_states.teacher", model, teacher)
        return teacher

    def batches(
        self, plan: BatchPlan, model: EmbeddingModel, stage: StageConfig, seed: int
    ) -> PairSteps:
        """Return the builder of this worker's share of each batch."""
        tokenizer = stage_tokenizer(stage, model.tokenizer)
        return PairSteps(plan, tokenizer, rank(), world_size(), stage.batch.num_positives)

    def source(self, plan: BatchPlan, step: int) -> str:
        """Name the data sets that a step's batch comes from, for messages."""
        names = sorted({pair.dataset for pair in plan.read_pairs(step)})
        return f"the data sets {', '.join(names)}" if len(names) > 1 else f"the data set {names[0]}"


CONTRASTIVE = EmbeddingObjective()


def _of_all_workers(
    ready: CollatedStep, everyone: Rows | None, device: torch.device
) -> tuple[Needed, int]:
    """Return the largest numbers of passes and tokens of any worker, and the number of repeated
    candidates, which `Columns.of` needs.

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


def keeps_graphs(
    setting: bool | GraphRoom, passes: Passes, tokens: Tokens, *, several: bool
) -> bool:
    """Whether to keep the autograd graphs of all passes; if not, GradCache recomputes them.

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

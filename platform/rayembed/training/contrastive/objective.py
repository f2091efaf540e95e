"""The contrastive objective: batches of a plan's pairs, and the step over them."""

import copy
from typing import cast

from torch import nn

from rayembed.assets.resolver import resolve_model
from rayembed.config.backbone import Dtype
from rayembed.config.stage import StageConfig
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.step_batch import StepBatch
from rayembed.data.plan.stream import PairSteps
from rayembed.data.vectors.lookup import StoredVectors
from rayembed.distributed.collectives import rank, world_size
from rayembed.distributed.grad_cache import Backward
from rayembed.errors import ConfigError
from rayembed.losses.contract import Contrastive, Pairwise
from rayembed.models.contract import (
    EmbeddingModel,
    PromptTokenizer,
    Tokenizer,
    TrainingTokenizer,
)
from rayembed.models.loading.load import load_model
from rayembed.training.contrastive.collated import CollatedStep
from rayembed.training.contrastive.hidden_states import check_comparable
from rayembed.training.contrastive.step import StepReport, StepSettings, collated_step, run_step
from rayembed.training.trainer import Objective


class EmbeddingObjective(Objective):
    """Queries near their positives, far from other candidates; the loss is the stage's."""

    trace = "--trace-batch"

    def check(self, stage: StageConfig) -> None:
        """Return when the stage's loss is one of embeddings."""
        if not isinstance(stage.loss, Contrastive | Pairwise):
            raise ConfigError(
                f"stages.{stage.name}.loss.kind is {stage.loss.kind!r}, which is no loss of "
                "embeddings, and the model gives embeddings; take another loss, such as infonce"
            )

    def teacher_widths(self, plan: BatchPlan) -> tuple[int, ...]:
        """Those of the stage's teachers."""
        return tuple(StoredVectors.open(folder).width for folder in plan.teachers)

    def teacher(
        self, model: EmbeddingModel, stage: StageConfig, dtype: str
    ) -> EmbeddingModel | None:
        """The stage's, of which `hidden_states` are learnt."""
        if stage.hidden_states is None:
            return None
        reference = stage.hidden_states.teacher
        teacher = load_model(resolve_model(reference), dtype=cast(Dtype, dtype))
        check_comparable(f"stages.{stage.name}.hidden_states.teacher", model, teacher)
        return teacher

    def batches(
        self, plan: BatchPlan, model: EmbeddingModel, stage: StageConfig, seed: int
    ) -> PairSteps:
        """Builder of this worker's share of each batch."""
        tokenizer = stage_tokenizer(stage, model.tokenizer)
        return PairSteps(plan, tokenizer, rank(), world_size())

    def ahead(
        self, model: EmbeddingModel, batch: StepBatch, stage: StageConfig, settings: StepSettings
    ) -> CollatedStep:
        """The batch in collated micro-batches."""
        return collated_step(model, batch, stage, settings)

    def run_step(
        self,
        model: EmbeddingModel,
        engine: nn.Module,
        backward: Backward,
        batch: StepBatch | CollatedStep,
        stage: StageConfig,
        settings: StepSettings,
    ) -> StepReport:
        """Accumulate the gradients of the stage's loss; see `step.run_step`."""
        return run_step(model, engine, backward, batch, stage, settings)

    def source(self, plan: BatchPlan, step: int) -> str:
        """The batch's data sets."""
        names = sorted({pair.dataset for pair in plan.read_pairs(step)})
        return f"the data sets {', '.join(names)}" if len(names) > 1 else f"the data set {names[0]}"


CONTRASTIVE = EmbeddingObjective()


def stage_tokenizer(stage: StageConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The training tokenizer, with the stage's lengths if it sets any.

    The given one is left as it is.
    """
    read = tokenizer.in_training() if isinstance(tokenizer, TrainingTokenizer) else tokenizer
    wanted = {"query": stage.query_max_length, "document": stage.document_max_length}
    if not any(wanted.values()):
        return read
    changed: PromptTokenizer = copy.copy(read)  # type: ignore[assignment] # all models' are
    changed.max_lengths = {r: wanted[r] or length for r, length in changed.max_lengths.items()}
    return changed

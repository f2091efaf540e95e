"""One stage of a run as each worker trains it; see `on_worker`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rayembed.assets.storage import exists
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.stream import PairSteps
from rayembed.distributed.collectives import rank, world_size
from rayembed.training.on_worker import TrainerHooks, Training, train_on_worker
from rayembed.training.stage_lengths import stage_tokenizer
from rayembed.training.step import run_step
from rayembed.training.validation.decision import validated_steps
from rayembed.training.validation.folder import ValidationFolder
from rayembed.training.validation.submission import WorkerValidation, whole_weights
from rayembed.training.weights import check_made_of, load_weights, weights_digest, write_weights


@dataclass(frozen=True)
class StageJob:
    """One stage of a run, as passed to every worker."""

    run: Run
    stage_index: int
    plan_folder: str
    start_weights: str | None
    """Storage path of the previous stage's trainable weights; None for a fresh initialisation."""
    weights: str
    """Storage path of the trained weights; their presence marks the stage as done."""
    validated_in: str | None = field(default=None, kw_only=True)
    """Storage folder of the stage, if its weights are scored during training: workers leave weights
    there, of which the driver chooses. None: the last step's weights are the result."""
    start_checkpoint: str | None = field(default=None, kw_only=True)
    """Storage folder of another run's checkpoint, with the same plan and model, to continue from
    when this run has none (population-based training). None for a normal start."""

    @property
    def stage(self) -> StageConfig:
        """The stage's settings."""
        return self.run.stages[self.stage_index]

    @property
    def loop_config(self) -> StageConfig:
        """The stage's settings as the trainer takes them."""
        return self.stage

    @property
    def placement(self) -> Placement:
        """Workers and hardware of the run."""
        return self.run.placement

    @property
    def pretrained(self) -> tuple[str, ...]:
        """References of the pretrained models."""
        return tuple(self.run.model.parts.values())

    def is_done(self) -> bool:
        """Whether the stage's weights are in storage, made by this run from this plan.

        Raises:
            ArtifactError: the weights there are of another run or of other data.
        """
        if not exists(self.weights):
            return False
        check_made_of(self.weights, _made_of(self, BatchPlan.open(self.plan_folder)))
        return True

    def train(self, hooks: TrainerHooks) -> None:
        """Train the stage on this worker and write its weights to storage; with validation, those
        of each scored step.

        Raises:
            RayembedError: an asset, plan or checkpoint cannot be used.
        """
        run, plan = self.run, BatchPlan.open(self.plan_folder)
        made_of = _made_of(self, plan)
        validation = _validation(self, made_of)
        training = Training(
            loop_config=self.stage,
            placement=self.placement,
            seed=run.seed,
            number=self.stage_index,
            dtype=run.model.backbone.dtype,
            run_fingerprint=run.fingerprint,
            plan_fingerprint=plan.fingerprint,
            load=lambda: load_weights(run, self.start_weights),
            batches=lambda model: PairSteps(
                plan, stage_tokenizer(self.stage, model.tokenizer), rank(), world_size()
            ),
            run_step=run_step,
            of_step=lambda step: _datasets(plan, step),
            trace="--trace-batch of the training job",
            validation=validation,
        )
        engine = train_on_worker(training, hooks)
        if validation is None:
            state = whole_weights(engine)
            if rank() == 0:
                write_weights(self.weights, state, made_of)


def _datasets(plan: BatchPlan, step: int) -> str:
    names = sorted({pair.dataset for pair in plan.read_pairs(step)})
    return f"the data sets {', '.join(names)}" if len(names) > 1 else f"the data set {names[0]}"


def _validation(job: StageJob, made_of: Mapping[str, str]) -> WorkerValidation | None:
    config = job.run.evaluation.validation
    if job.validated_in is None or config is None:
        return None
    return WorkerValidation(
        ValidationFolder(job.validated_in),
        validated_steps(job.stage.steps, job.run.validation_interval(job.stage)),
        config.early_stopping,
        made_of,
        torch.device("cuda" if job.placement.use_gpu else "cpu"),
    )


def _made_of(job: StageJob, plan: BatchPlan) -> dict[str, str]:
    """Inputs of a stage's weights: the run, its data, the initial weights."""
    start = "" if job.start_weights is None else weights_digest(job.start_weights)
    if job.start_checkpoint is not None:
        start = job.start_checkpoint
    return {"run": job.run.fingerprint, "plan": plan.fingerprint, "start": start}

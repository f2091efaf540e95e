"""Training job of a stage: a picklable description from which every worker makes its trainer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import exists
from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.config.table import load
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.vectors.lookup import TeacherVectorLookup
from rayembed.models.architecture import architecture_of
from rayembed.models.contract import EmbeddingModel, TrainableModel
from rayembed.models.loading.files import weights_fingerprint
from rayembed.training.callbacks import WorkerValidation, WriteWeights
from rayembed.training.checkpoints.weights import check_made_of, load_weights, weights_digest
from rayembed.training.objective import Objective
from rayembed.training.trainer import Callback, StageTrainer, Stream
from rayembed.training.validation.decision import validated_steps
from rayembed.training.validation.folder import ValidationFolder


class Job(ABC):
    """Base class of training jobs: describes one training completely, and is sent to every
    worker.
    """

    run: Any
    """Settings: the model, the seed, the placement, a fingerprint."""
    plan_folder: str
    """Storage folder of the plan that batches are made from."""
    weights: str
    """Storage path of the trained weights; their presence marks the job as done."""
    number: int
    """Position of the stage in its run."""
    validated_in: str | None = None
    """Storage folder of the stage, if its weights are scored during training: workers store weights
    there, and the driver chooses among them. None: the last step's weights are the result."""
    callbacks: tuple[Callback, ...] = ()
    """Further callbacks of the trainer on every worker; picklable."""

    @property
    @abstractmethod
    def stage(self) -> TrainLoopConfig:
        """Settings of the training steps and the optimiser."""

    @property
    @abstractmethod
    def pretrained(self) -> tuple[str, ...]:
        """References of the pretrained models, such as hub names or paths."""

    @abstractmethod
    def plan(self) -> Any:
        """Open the batch plan, which determines the rows of every batch."""

    @abstractmethod
    def model(self) -> TrainableModel:
        """Build the initial model on the CPU."""

    @abstractmethod
    def objective(self, plan: Any) -> Objective:
        """Return the stage's training objective."""

    def fetch(self) -> None:
        """Download the training's models and data to this machine, unless they are there
        already.

        Raises:
            AssetError, ArtifactError: something is missing, corrupt, or has no room.
        """
        for reference in self.pretrained:
            resolve_model(reference)

    def start(self) -> str:
        """Return the digest of the initial weights; empty for pretrained weights."""
        return ""

    def result(self, made_of: dict[str, str]) -> Callback:
        """Make the callback that writes the trained weights to storage."""
        return WriteWeights(self.weights, made_of)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the settings and models that the trained weights depend on; plan and
        initial weights have their own.
        """
        own: str = self.run.fingerprint
        return own

    @property
    def placement(self) -> Placement:
        """Settings of workers and hardware."""
        placement: Placement = self.run.placement
        return placement

    def is_done(self) -> bool:
        """Whether storage has trained weights that this run made from this plan.

        Raises:
            ArtifactError: the weights there are of another run or of other data.
        """
        if not exists(self.weights):
            return False
        check_made_of(self.weights, self._made_of(self.plan()))
        return True

    def trainer(self, callbacks: Sequence[Callback], stream: Stream) -> StageTrainer:
        """Make this worker's trainer, which writes the trained weights to storage.

        Raises:
            RayembedError: the plan or a pretrained model cannot be used.
        """
        plan = self.plan()
        return StageTrainer(
            self.stage,
            self.placement,
            self.model(),
            self.objective(plan),
            plan,
            seed=self.run.seed,
            number=self.number,
            dtype=self.run.model.backbone.dtype,
            run_fingerprint=self.fingerprint,
            # Further ones first: what they add to a step's record is logged.
            callbacks=[*self.callbacks, *callbacks, self.result(self._made_of(plan))],
            stream=stream,
        )

    def _made_of(self, plan: Any) -> dict[str, str]:
        """Record of the inputs of the trained weights: the run, its data plan, the initial
        weights.
        """
        return {
            "run": self.fingerprint,
            "plan": plan.fingerprint,
            "start": self.start(),
        }


@dataclass(frozen=True)
class StageJob(Job):
    """Job that trains one stage of a run."""

    run: Run
    number: int
    plan_folder: str
    start_weights: str | None
    """Storage path of the previous stage's trainable weights; None for a fresh initialisation."""
    weights: str
    validated_in: str | None = field(default=None, kw_only=True)
    callbacks: tuple[Callback, ...] = field(default=(), kw_only=True)

    @property
    def stage(self) -> StageConfig:
        """Settings of the stage that this job trains."""
        return self.run.stages[self.number]

    @property
    def pretrained(self) -> tuple[str, ...]:
        """References of the pretrained models, including a teacher whose hidden states the model
        learns to match.
        """
        states = self.stage.hidden_states
        return (*self.run.model.parts.values(), *([] if states is None else [states.teacher]))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run and, if hidden states of a teacher are learnt, of the teacher's
        weights.
        """
        states = self.stage.hidden_states
        if states is None:
            return self.run.fingerprint
        weights = weights_fingerprint(resolve_model(states.teacher))
        return f"{self.run.fingerprint} with hidden states of {weights}"

    def plan(self) -> BatchPlan:
        """Open the stage's batch plan."""
        return BatchPlan.open(self.plan_folder)

    def fetch(self) -> None:
        """Download pretrained models and the vectors of the stage's teachers to this machine."""
        super().fetch()
        for folder in self.plan().teachers if self.stage.teachers else ():
            TeacherVectorLookup.open(folder).fetch()

    def model(self) -> EmbeddingModel:
        """Build the run's model with the weights of the previous stage."""
        return load_weights(self.run, self.start_weights)

    def objective(self, plan: BatchPlan) -> Objective:
        """Return the training objective of the model's architecture."""
        found: Objective = load(architecture_of(self.run.model).objective)
        return found

    def start(self) -> str:
        """Return the digest of the weights that this stage starts from; empty for pretrained
        weights.
        """
        return "" if self.start_weights is None else weights_digest(self.start_weights)

    def result(self, made_of: dict[str, str]) -> Callback:
        """Make the callback that writes the final weights to storage or, with validation, the
        weights of each step to score.
        """
        config = self.run.evaluation.validation
        if self.validated_in is None or config is None:
            return super().result(made_of)
        return WorkerValidation(
            ValidationFolder(self.validated_in),
            validated_steps(self.stage.steps, self.run.validation_interval(self.stage)),
            config.early_stopping,
            made_of,
        )

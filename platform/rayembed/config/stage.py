"""Settings of one training stage: batches, loss, optimiser, length."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.compatible import OldModel, check_compatible, with_old_model
from rayembed.config.loss import LOSSES, LossConfig
from rayembed.config.mining import Teacher
from rayembed.config.optimizer import OPTIMIZERS, OptimizerConfig
from rayembed.config.settings import Settings
from rayembed.config.types import ModelReference, SortedDict
from rayembed.errors import ConfigError

# Members import the base classes, so that tables are read here and not where these stand.
if TYPE_CHECKING:
    AnyLoss = LossConfig
    AnyOptimizer = OptimizerConfig
else:
    AnyLoss = LOSSES.union()
    AnyOptimizer = OPTIMIZERS.union()


class BatchConfig(Settings):
    """Settings for composing global batches, which do not depend on the number of workers."""

    policy: Literal["blended", "homogeneous", "clustered"] = "blended"
    """Batch policy. `blended`: every batch draws from all data sets of the stage, by weight
    (NV-Embed). `homogeneous`: every batch has a single data set and language (Nomic Embed,
    Causal2Vec). `clustered`: batches are those of a data set's `clusters` (CDE)."""
    temperature: PositiveFloat | None = None
    """Temperature T: a data set's share is its weight times its number of rows to the power 1/T;
    None: its weight alone. With `homogeneous`, languages of a data set likewise share its steps by
    rows to the power 1/T; None: by rows."""
    global_pairs: PositiveInt
    """Queries in one step, over all workers."""
    num_negatives: int = Field(default=0, ge=0)
    """Hard negatives for each query, mined or from the rows; shorter lists are padded and masked,
    and counted during preparation. 0: none."""
    num_positives: PositiveInt = Field(default=1, exclude_if=lambda it: it == 1)
    """Positives of a query that a step trains at once, as far as its row has them (`infonce`). A
    row with fewer trains all of its; 1: one at a time, in turn."""
    in_batch_negatives: bool
    """Whether other queries' documents count as negatives (stage 1 of NV-Embed: yes)."""


def steps_of(epochs: float, rows: int, global_pairs: int) -> int:
    """Convert epochs to steps: the nearest whole number, at least 1."""
    return max(1, round(epochs * rows / global_pairs))


class HiddenStates(Settings):
    """Settings for distilling the hidden states of a teacher, as a loss added to the stage's own
    (NV-Embed, arXiv 2405.17428, appendix A.2).
    """

    teacher: ModelReference
    """Asset reference of the uncompressed or larger copy of the model that is trained, with its
    architecture, width and tokenizer."""
    weight: PositiveFloat = 1.0
    """α: factor of the squared errors, which are summed over layers and averaged over tokens and
    components."""


class StageConfig(Settings):
    """Settings of one training stage. Optimiser and schedule are reset in each; weights are carried
    over.
    """

    replaces: ClassVar = {"steps": "epochs"}
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name, also of the folder of its plan and checkpoints."""
    datasets: SortedDict[str, PositiveFloat] = Field(min_length=1)
    """Weight of each data set by name: the share of rows drawn from it."""
    batch: BatchConfig
    loss: AnyLoss = Field(default=LOSSES.default)
    """Loss to minimise; by default InfoNCE."""
    teachers: tuple[Teacher, ...] = ()
    """Embedding models whose vectors of all texts are computed before the stage, to learn from or
    mask by; none of them runs in a step."""
    compatible_with: OldModel | None = Field(default=None, exclude_if=lambda it: it is None)
    """Old model whose vectors an index holds: the trained model's queries then find them. It
    becomes the only entry of `teachers`, and `loss` becomes `vector_distillation` without a
    projection, beside the InfoNCE of the stage. None: the new vectors may lie anywhere."""
    hidden_states: HiddenStates | None = None
    """Teacher whose hidden states are distilled too, with any loss; None: none are."""
    optimizer: AnyOptimizer
    steps: PositiveInt
    """Weight updates; with `epochs` an estimate, until the prepared records are counted. Setting
    it drops the recipe's `epochs`; one command that sets both is refused."""
    epochs: PositiveFloat | None = None
    """Number of passes over the training records, which decide `steps`, rounded to whole ones, when
    the data is prepared; None: `steps` is what it says."""
    query_max_length: PositiveInt | None = None
    """Maximum tokens of a query in this stage, if lower than the model's (Nomic Embed v2 pretrains
    with 32); None: the model's."""
    document_max_length: PositiveInt | None = None
    """Maximum tokens of a document in this stage; see `query_max_length`."""
    checkpoint_every_steps: PositiveInt = 1000
    """Steps between checkpoints, from which a killed run resumes; one is always made at the end."""

    @property
    def length(self) -> str:
        """Length of the stage as configured: `1,000 steps` or `1 epoch`."""
        if self.epochs is None:
            return f"{self.steps:,} step{'s' if self.steps != 1 else ''}"
        return f"{self.epochs:g} epoch{'s' if self.epochs != 1 else ''}"

    @property
    def global_rows(self) -> int:
        """Number of rows in one step, summed over all workers; see `TrainLoopConfig`."""
        return self.batch.global_pairs

    @property
    def row_name(self) -> str:
        """Plural noun for the rows in log lines: `pairs`."""
        return "pairs"

    def check_widths(self, full: int) -> None:
        """Check that every width of the loss is below that of the model's vectors.

        Args:
            full: width of the model's vectors.

        Raises:
            ConfigError: one is not.
        """
        if wrong := [width for width in self.loss.dimensions if width >= full]:
            raise ConfigError(
                f"stages.{self.name}.loss.dimensions names {wrong}, but the model's full width is "
                f"{full}, which is always trained; name only widths below it"
            )

    def check_model(self, model: ArchitectureConfig) -> None:
        """Check that the model offers the widths that the loss learns, and accepts texts of the
        stage's maximum length.

        Raises:
            ValueError: it does not.
        """
        offered = model.offered_dimensions
        if offered is not None and (lost := [d for d in self.loss.dimensions if d not in offered]):
            raise ValueError(
                f"stages.{self.name}.loss.dimensions trains the vector widths {lost}, but "
                f"model.dimensions {offered} does not list them, so users could not request such "
                "vectors; add these widths to model.dimensions"
            )
        for name in ("query_max_length", "document_max_length"):
            wanted, most = getattr(self, name), getattr(model, name)
            if wanted is not None and wanted > most:
                raise ValueError(
                    f"stages.{self.name}.{name} {wanted} exceeds model.{name} {most}; a stage "
                    "may read less of a text than the model, not more"
                )

    def check_steps(self, steps: int | None) -> None:
        """Check that the optimiser's warm-up and schedule fit the stage; see `OptimizerConfig`.

        Raises:
            ValueError: they do not fit so many steps.
        """
        try:
            self.optimizer.check_steps(steps)
        except ValueError as error:
            of = "" if steps is None or self.epochs is None else f" ({self.length})"
            raise ValueError(f"stage {self.name!r}{of}: {error}") from None

    @model_validator(mode="before")
    @classmethod
    def _with_old_model(cls, values: Any) -> Any:
        return with_old_model(values)

    @model_validator(mode="after")
    def _can_learn(self) -> "StageConfig":
        # Those of epochs are known only when records are estimated or counted.
        self.check_steps(self.steps if self.epochs is None else None)
        if self.batch.policy == "clustered" and not self.batch.in_batch_negatives:
            raise ValueError(
                f"stage {self.name!r}: the policy 'clustered' puts pairs that are hard negatives "
                "of each other into the same batch, but batch.in_batch_negatives=false does not "
                "use them; set in_batch_negatives to true, or set another batch.policy"
            )
        if self.optimizer.loss_learning_rate is not None and not self.loss.parameter_names:
            raise ValueError(
                f"stage {self.name!r}: optimizer.loss_learning_rate has no effect, because the "
                f"loss {self.loss.kind!r} has no parameters; set it to null"
            )
        negatives = self.batch.in_batch_negatives or self.batch.num_negatives
        if not self.loss.takes_candidates:
            if negatives:
                raise ValueError(
                    f"stage {self.name!r}: the loss {self.loss.kind!r} compares pairs with each "
                    "other and reads no negatives; set batch.in_batch_negatives=false and "
                    "batch.num_negatives=0"
                )
        elif not negatives:
            raise ValueError(
                f"stage {self.name!r} has neither in-batch nor hard negatives, so its loss is "
                "always zero; set batch.in_batch_negatives=true or batch.num_negatives above 0"
            )
        batch = self.batch
        try:
            self.loss.check_batch(
                batch.in_batch_negatives, batch.num_negatives, batch.num_positives
            )
        except ValueError as error:
            raise ValueError(f"stage {self.name!r}: {error}") from None
        if self.compatible_with is not None:
            check_compatible(self.name, self.compatible_with, self.loss, self.teachers)
        self._check_teachers()
        if "teacher_scores" in self.loss.needs and not self.batch.num_negatives:
            raise ValueError(
                f"stage {self.name!r}: the loss {self.loss.kind!r} reads a teacher's scores of "
                "hard negatives, but the stage uses no hard negatives; set batch.num_negatives "
                "above 0, and set data.datasets.NAME.mining.teacher for data sets whose negatives "
                "are not mined yet"
            )
        return self

    def _check_teachers(self) -> None:
        """Raise if the loss needs teacher vectors but the stage names no teacher, or the
        reverse.
        """
        needed = "teacher_vectors" in self.loss.needs
        if needed and not self.teachers:
            raise ValueError(
                f"stage {self.name!r}: the loss {self.loss.kind!r} reads vectors of teachers, but "
                f"the stage names no teacher; set stages.{self.name}.teachers=[{{teacher: …}}] to "
                "one or several embedding models"
            )
        if self.teachers and not needed:
            raise ValueError(
                f"stage {self.name!r}: teachers have no effect, because the loss "
                f"{self.loss.kind!r} does not read their vectors; use a loss that does "
                "(vector_distillation, similarity_distillation), set "
                "loss.false_negatives.by=teachers, or remove the teachers"
            )
        if len(set(self.teachers)) < len(self.teachers):
            raise ValueError(
                f"stage {self.name!r}: `teachers` names the same teacher twice; name each teacher "
                "once"
            )

"""Base class of optimiser settings, learning rate schedules, and the table of available
optimisers.

An optimiser is one file of `optim/`: its settings, the names of its states, how it is built.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from rayembed.config.loss import LossConfig
from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable
from rayembed.config.types import SortedDict


class ScheduleConfig(Settings):
    """Base class of learning rate schedules after the warm-up.

    A schedule without settings of its own is written as its kind alone: `schedule: cosine`.
    """

    kind: str

    decays: ClassVar[bool] = True
    """Whether the rate falls to zero, after the last step or after `optimizer.decay_steps`."""

    def factor(self, progress: float) -> float:
        """Compute the learning rate as a fraction of its peak.

        Args:
            progress: share of the steps from the warm-up to the end that are done, in [0, 1).
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `factor`")

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> Any:
        values = handler(self)
        return values["kind"] if len(values) == 1 else values


SCHEDULES = SettingsTable(
    "rayembed.schedules",
    ScheduleConfig,
    (
        "rayembed.optim.cosine:Linear",
        "rayembed.optim.cosine:Cosine",
        "rayembed.optim.cosine:Constant",
        "rayembed.optim.cosine:WSD",
    ),
    default="linear",
)
"""All schedules by their `kind`."""


class OptimizerConfig(Settings):
    """Base class of optimiser settings: learning rates by parameter group, weight decay and
    schedule, all explicit.
    """

    kind: str
    learning_rate: PositiveFloat
    """Peak learning rate, after the warm-up."""
    pooling_learning_rate: PositiveFloat | None = None
    """Learning rate of randomly initialised parameters outside the backbone; None: the same."""
    loss_learning_rate: PositiveFloat | None = None
    """Learning rate of the loss's own parameters; None: the same."""
    rates: SortedDict[str, PositiveFloat] = Field(default={})
    """Learning rates of parameters by name, which override all others: `{"*.router.*": 1e-4}`. `*`
    stands for any characters; each pattern must match a parameter, and none may match two."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay; not on biases, norms and other vectors, nor on a loss's parameters.
    """
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up: step 1 has 1/`warmup_steps` of the peak; 0: by `warmup_share`."""
    warmup_share: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the steps used as warm-up where `warmup_steps` is 0; None: none."""
    schedule: "AnySchedule" = Field(default=SCHEDULES.default)
    """Schedule after the warm-up: `linear` or `cosine` decay, `constant`, or `wsd`, which is
    constant and then decays. The first step after the warm-up has the peak, and zero would be
    reached one step after the last, so that no step has a rate of zero."""
    decay_steps: PositiveInt | None = None
    """Steps, warm-up included, after which the schedule is at zero; None: all of the stage's.
    Causal2Vec decays over twice the steps that it runs (Table 7)."""
    gradient_clipping: float = Field(default=1.0, ge=0.0)
    """Maximum global gradient norm; 0: no clipping. Always passed to DeepSpeed, whose own default
    clips at 1.0."""

    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    """ZeRO stages that the optimiser supports."""
    why_not: ClassVar[str] = ""
    """Reason why it does not support the others."""
    state_bytes: ClassVar[int] = 12
    """Bytes of the fp32 master weight and the states of each trained parameter."""
    splits_matrices: ClassVar[bool] = False
    """Whether linear weights of the backbone form separate parameter groups, `matrices`."""

    def states(self, *, matrix: bool) -> tuple[str, ...]:
        """Names of the optimiser state tensors that have a parameter's shape; the step counter is
        not among them.

        Args:
            matrix: whether it is the weight of a linear layer in the backbone.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `states`")

    def build(self, groups: list[dict[str, Any]], *, bfloat16: bool) -> Any:
        """Build the torch optimiser over parameter groups; see `training.optimizer`.

        Args:
            bfloat16: whether the model computes in bfloat16.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `build`")

    def warmup(self, steps: int) -> int:
        """Compute the number of warm-up steps from the total number of steps."""
        return self.warmup_steps or min(round((self.warmup_share or 0.0) * steps), steps - 1)

    def check_steps(self, steps: int | None) -> None:
        """Check that warm-up and schedule fit the number of steps.

        Args:
            steps: None: not known yet, so that only what holds for any number is checked.

        Raises:
            ValueError: they do not.
        """
        if steps is not None and self.warmup_steps >= steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.warmup_steps} must be below the {steps} training "
                "steps; lower warmup_steps, or set it to 0 and optimizer.warmup_share to 0.1, "
                "which fits any number of steps"
            )
        decay = self.decay_steps
        if decay is not None and not self.schedule.decays:
            raise ValueError(
                f"optimizer.decay_steps {decay} needs a schedule that decays, but "
                f"{self.schedule.kind!r} does not; set decay_steps to null"
            )
        if steps is not None and decay is not None and decay < steps:
            raise ValueError(
                f"optimizer.decay_steps {decay} must be at least the number of training steps, "
                f"{steps}"
            )

    def check_zero_stage(self, zero_stage: int) -> None:
        """Check that the optimiser supports the ZeRO stage.

        Raises:
            ValueError: it cannot; the message says why and which stages it can work under.
        """
        if zero_stage not in self.zero_stages:
            raise ValueError(
                f"placement.zero_stage {zero_stage} does not support optimizer.kind "
                f"{self.kind!r}: {self.why_not}; set placement.zero_stage to one of "
                f"{', '.join(map(str, self.zero_stages))}, or use another optimiser"
            )


OPTIMIZERS = SettingsTable(
    "rayembed.optimizers",
    OptimizerConfig,
    ("rayembed.optim.adamw:AdamW", "rayembed.optim.muon:Muon"),
    default="adamw",
)
"""All optimisers by their `kind`."""

# The table is read last, and then classes are completed: a module from outside may bring a schedule
# and, beside it, an optimiser that derives from one of ours.
if TYPE_CHECKING:
    AnySchedule = ScheduleConfig
else:
    AnySchedule = SCHEDULES.union()


def _complete(optimizer: type[OptimizerConfig]) -> None:
    optimizer.model_rebuild(_types_namespace={"AnySchedule": AnySchedule})
    for derived in optimizer.__subclasses__():
        _complete(derived)


_complete(OptimizerConfig)


class TrainLoopConfig(Protocol):
    """Interface of the settings of a training loop: a stage of a run, or an adaptation."""

    @property
    def name(self) -> str:
        """Name used in the loop's folder, checkpoints and log lines."""
        ...

    @property
    def steps(self) -> int:
        """Number of weight updates."""
        ...

    @property
    def checkpoint_every_steps(self) -> int:
        """Number of steps between two checkpoints; the last step always has one."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig:
        """The optimiser and its schedule."""
        ...

    @property
    def loss(self) -> LossConfig | None:
        """The loss over embeddings; None for an objective without embeddings."""
        ...

    @property
    def global_rows(self) -> int:
        """Number of rows in one step, summed over all workers."""
        ...

    @property
    def row_name(self) -> str:
        """Plural noun for the rows in log lines: `pairs`, `sequences`."""
        ...

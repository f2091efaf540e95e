"""Evaluation settings of a training run: validation, scored tasks, compared models and the
guard.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.mining import CrossEncoder
from rayembed.config.own_sets import OwnSet, Scores, kinds_by_default
from rayembed.config.settings import Settings, nearest
from rayembed.config.types import (
    Distinct,
    ModelReference,
    PlainName,
    Reference,
    SortedDict,
    unique_names,
)


class MtebValidation(Settings):
    """Validate on tasks of NanoBEIR from the hub: 50 queries and some thousand documents
    each.

    Their queries are among those of BEIR, so a model chosen by them has seen a little of it: do
    not report BEIR's scores of it as if it had not.
    """

    kind: Literal["mteb"] = "mteb"
    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks of mteb's benchmark NanoBEIR; tasks of other benchmarks are refused."""
    instructions: SortedDict[str, str] = Field(default_factory=dict)
    """Task definition put before the queries of a task, by the task's name; an empty text: none.
    Tasks left out have what an evaluation of the model by `evaluate_model` puts there."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the validation tasks."""
        return self.tasks

    @model_validator(mode="after")
    def _instructions_are_of_tasks(self) -> "MtebValidation":
        check_names("instructions", self.instructions, self.tasks)
        return self


class BeirValidation(Settings):
    """Validate on the user's own queries, documents and judgements in BEIR's layout."""

    kind: Literal["beir"] = "beir"
    path: Reference
    """Folder with `corpus`, `queries` and `qrels` (JSONL, TSV, CSV or Parquet), local, `s3://…` or
    `gs://…`; a relative path is taken from `data.root`."""
    split: str = "dev"
    """Split of judgements, read from `qrels/<split>.tsv`."""
    name: PlainName = "validation"
    """Name of its score."""
    instruction: str = ""
    """Task definition put before queries; empty: what an evaluation of the model puts there, for
    models with an instruction template general words."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the validation tasks."""
        return (self.name,)


class OwnSetsValidation(Settings):
    """Validate on own sets of any kind; use other sets than for scores after training."""

    kind: Literal["own_sets"] = "own_sets"
    sets: Annotated[tuple[OwnSet, ...], kinds_by_default, unique_names("own sets")] = Field(
        min_length=1
    )
    """The sets, small ones; a relative path is taken from `data.root`. What stands before their
    texts is as in the scores after training."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the validation tasks."""
        return tuple(own.name for own in self.sets)


class HeldOutValidation(Settings):
    """Validate on the held-out parts of the run's data sets, which are also scored after
    training.

    Whatever is chosen by them (with `keep: best` a step, in a sweep also the trial) was chosen by
    the texts that its score is reported of, which flatters it; where that matters, report it on
    texts of another kind.
    """

    kind: Literal["held_out"] = "held_out"


class EarlyStoppingConfig(Settings):
    """Settings of the rule that ends a stage before its last step."""

    patience: PositiveInt = 3
    """Number of consecutive scores without improvement; missing scores do not count."""
    min_delta: float = Field(default=0.0, ge=0.0)
    """Minimum gain over the previous best score that counts as an improvement."""


class ValidationConfig(Settings):
    """Settings for scoring a stage's weights at intervals during training."""

    data: Annotated[
        MtebValidation | BeirValidation | OwnSetsValidation | HeldOutValidation,
        Field(discriminator="kind"),
    ]

    every_steps: PositiveInt | None = None
    """Steps between two scores, counted in each stage; the last step always has one. None: the
    stage's `checkpoint_every_steps`."""
    weights: SortedDict[str, PositiveFloat] = Field(default_factory=dict)
    """Weight of a task's main score by the task's name; tasks left out weigh 1. The mean under
    these weights is the score that decides."""
    keep: Literal["best", "last"] = "best"
    """Weights that a stage passes on: those of its best score (of equal ones the first), or those
    of its last step, whatever the scores."""
    early_stopping: EarlyStoppingConfig | None = None
    """Early stopping; None: every stage runs to its last step."""

    @model_validator(mode="after")
    def _fits(self) -> "ValidationConfig":
        if not isinstance(self.data, HeldOutValidation):  # whose names the run knows
            check_names("weights", self.weights, self.data.task_names)
        if self.early_stopping is not None and self.keep == "last":
            raise ValueError(
                "early_stopping with keep 'last' would keep the weights of whatever step training "
                "stopped at, which depends on how quickly scores arrive; set keep=best"
            )
        return self


def check_names(
    setting: str, given: dict[str, float] | dict[str, str], names: tuple[str, ...]
) -> None:
    """Raise if a setting names a task that is not among the validation tasks.

    Raises:
        ValueError: it names another one; the message has the nearest.
    """
    for name in given:
        if name not in names:
            raise ValueError(
                f"{setting} names {name!r}, which is not one of the validation tasks; "
                f"{nearest(name, names)}"
            )


SAMPLE = "sample://"
"""Prefix of references to a sample's files."""

_Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class GuardConfig(Settings):
    """Settings of the guard, which keeps the untrained model, the trained one or a mixture of both:
    the one that gains most on own data at an allowed loss on general tasks.

    Own data are the held-out parts of the data sets and `evaluation.own_sets` but for those of a
    sample; all other tasks of the run are general ones.
    """

    shares: Distinct[_Share] = (0.75, 0.5, 0.25)
    """Shares of the trained model in the mixtures."""
    method: Literal["linear", "slerp", "ties", "dare"] = "linear"
    """Method of mixing weights with those before training, θ₀. `linear`: θ₀ + share · (θ - θ₀)
    (WiSE-FT, arXiv 2109.01903; task arithmetic of one task). `slerp`: along the arc between them,
    tensor by tensor. `ties`: as `linear`, of the largest changes alone (arXiv 2306.01708). `dare`:
    as `linear`, of a random part of the changes, scaled up (arXiv 2311.03099)."""
    density: float | None = Field(default=None, gt=0.0, le=1.0, exclude_if=lambda it: it is None)
    """Share of the changes that `ties` and `dare` keep; None: 0.2."""
    last_checkpoints: int | None = Field(default=None, ge=2, exclude_if=lambda it: it is None)
    """Number of the last stage's last checkpoints whose mean is one more candidate (arXiv
    2209.14981); `placement.keep_checkpoints` must be as high. None: no such candidate."""
    own_sets: Distinct[str] | None = None
    """Names of the `evaluation.own_sets` that count as own data; None: all but those of a sample
    (`sample://…`), which benchmarks are made of."""
    most_loss: float | None = Field(default=None, ge=0.0, le=1.0)
    """Largest allowed drop of the mean general-task score, on a scale of 0 to 1. None: less than
    the gain on own data, and less than 0.03."""
    take: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the trained model to keep regardless of the scores, 1 being the trained model
    itself; None: the scores decide. A run that is done takes it without training again."""

    @model_validator(mode="after")
    def _density_is_read(self) -> "GuardConfig":
        if self.density is not None and self.method not in ("ties", "dare"):
            raise ValueError(
                f"density={self.density:g} has no effect, because the method {self.method!r} keeps "
                "all changes; set density=null, or method to ties or dare"
            )
        return self

    @property
    def mixed(self) -> tuple[float, ...]:
        """Shares of the trained model in the mixtures to make: the configured candidates, or only
        the one set by `take`.
        """
        if self.take is None:
            return self.shares
        return (self.take,) if self.take < 1 else ()

    @property
    def averages(self) -> bool:
        """Whether the mean of checkpoints is a candidate."""
        return self.take is None and self.last_checkpoints is not None


class Reranker(CrossEncoder):
    """Settings of a cross-encoder that orders the best documents of a search again."""

    top_k: PositiveInt = 100
    """Best documents of each query that it scores; the others stay behind them."""


class EvaluationConfig(Scores):
    """Settings for scoring a run's models and the models compared with them."""

    before_training: bool = True
    """Whether the untrained model is scored for comparison."""
    baselines: tuple[ModelReference, ...] = ()
    """Asset references of embedding models to compare with, or `bm25`, which also brings rows of
    hybrid search (BM25 and the run's models, fused by reciprocal ranks)."""
    # Left out while it is None, so that runs without one keep their names.
    reranker: Reranker | None = Field(default=None, exclude_if=lambda it: it is None)
    """Cross-encoder for two further rows beside each hybrid one: the best documents of the model,
    and those of the hybrid search, put in order by it; None: no such rows. Needs `bm25` among the
    baselines."""
    instructions: SortedDict[str, str] = Field(default_factory=dict)
    """Task definition put before the queries of a task and before texts of symmetric tasks, by the
    name of the task or of a type of task (`STS`); as in training. The model is saved with them.
    Tasks left out have what `evaluate_model` puts there: models with an instruction template always
    have one; an empty text: none."""
    validation: ValidationConfig | None = None
    """Scores during training, by which weights are selected; None: there are none."""
    guard: GuardConfig | None = None
    """Keeps the trained model or a mixture with its start: the one that gains most on own data
    without losing more than allowed on general tasks; None: the trained model is kept, whatever its
    scores."""

    @model_validator(mode="after")
    def _reranks_something(self) -> "EvaluationConfig":
        if self.reranker is not None and "bm25" not in self.baselines:
            raise ValueError(
                "evaluation.reranker also reorders the results of the hybrid search, but "
                "evaluation.baselines lacks bm25, which hybrid search needs; add bm25 there, or "
                "remove evaluation.reranker"
            )
        return self

    @model_validator(mode="after")
    def _instructions_have_no_side(self) -> "EvaluationConfig":
        own = {own.name for own in self.own_sets}
        for name in self.instructions:
            task = name.removesuffix("-query").removesuffix("-document")
            if task != name and name not in own:
                raise ValueError(
                    f"evaluation.instructions names {name!r}, which is one side of the task "
                    f"{task!r}; use the name {task!r}. Its instruction is put before queries and "
                    "before texts of symmetric tasks. For documents set the model's document "
                    "prefix, or document_instruction of the data sets"
                )
        return self

    @property
    def num_mixtures(self) -> int:
        """Number of mixtures that the guard makes and scores."""
        guard = self.guard
        return 0 if guard is None else len(guard.mixed) + guard.averages


def own_sets_of(guard: GuardConfig, evaluation: EvaluationConfig) -> tuple[str, ...]:
    """Names of the own sets that the guard counts as the user's own data."""
    if guard.own_sets is not None:
        return guard.own_sets
    return tuple(s.name for s in evaluation.own_sets if not s.path.startswith(SAMPLE))


def check_guard(
    guard: GuardConfig, evaluation: EvaluationConfig, holds_out: bool, kept: int
) -> None:
    """Check that the guard has own data on which to compare models, and the checkpoints that it
    averages.

    Args:
        holds_out: whether a data set of the run holds a part out.
        kept: number of checkpoints that the run keeps.

    Raises:
        ValueError: there is not; the message says what to set.
    """
    if guard.last_checkpoints is not None and guard.last_checkpoints > kept:
        raise ValueError(
            f"evaluation.guard.last_checkpoints is {guard.last_checkpoints}, but the run keeps "
            f"{kept} checkpoints; set placement.keep_checkpoints={guard.last_checkpoints}, or "
            "lower last_checkpoints"
        )
    if not evaluation.before_training:
        raise ValueError(
            "evaluation.guard compares with the model before training; set "
            "evaluation.before_training=true, or evaluation.guard=null"
        )
    sets = {one.name for one in evaluation.own_sets}
    own = own_sets_of(guard, evaluation)
    for name in own:
        if name not in sets:
            raise ValueError(
                f"evaluation.guard.own_sets names {name!r}, which evaluation.own_sets lacks; "
                f"{nearest(name, sets)}"
            )
    if not (holds_out or own):
        raise ValueError(
            "evaluation.guard compares models on your own data, but no data set has a held-out "
            "part; set evaluation.guard=null, or name your own judged sets in "
            "evaluation.own_sets, or hold out a part (data.datasets.NAME.held_out={kind: "
            "fraction})"
        )

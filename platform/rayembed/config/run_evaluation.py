"""The evaluation of a training run: what its models are scored on, and beside which others."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayembed.config.own_sets import Scores
from rayembed.config.settings import Settings, nearest
from rayembed.config.types import Distinct, ModelReference, SortedDict
from rayembed.config.validation import ValidationConfig

SAMPLE = "sample://"
"""How references of a sample's files begin."""

_Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class GuardConfig(Settings):
    """After training, the model before and after it and mixtures of both are scored; kept is the
    one that gains most on own data among those that lose less elsewhere.

    Own data are the held-out parts of the data sets and `evaluation.own_sets` but for those of a
    sample; all other tasks of the run are general ones.
    """

    shares: Distinct[_Share] = (0.75, 0.5, 0.25)
    """Shares of the trained model in the mixtures."""
    method: Literal["linear", "slerp"] = "linear"
    """How weights are mixed with those before training, θ₀. `linear`: θ₀ + share · (θ - θ₀)
    (WiSE-FT, arXiv 2109.01903; task arithmetic of one task). `slerp`: along the arc between them,
    tensor by tensor."""
    own_sets: Distinct[str] | None = None
    """Names of the `evaluation.own_sets` that are own data; None: all but those of a sample
    (`sample://…`), which benchmarks are made of."""
    most_loss: float | None = Field(default=None, ge=0.0, le=1.0)
    """How much lower the mean score of general tasks may be than before training, of 1; None: less
    than the gain on own data, and less than 0.03."""
    take: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the trained model that is kept whatever the scores say, 1 being the trained model
    itself; None: the scores decide. A run that is done takes it without training again."""

    @property
    def mixed(self) -> tuple[float, ...]:
        """Shares of the mixtures that are made: that which is taken, or all candidates."""
        if self.take is None:
            return self.shares
        return (self.take,) if self.take < 1 else ()


class EvaluationConfig(Scores):
    """Scores that a run takes, and the other models beside which they stand."""

    before_training: bool = True
    """Whether the untrained model is scored for comparison."""
    baselines: tuple[ModelReference, ...] = ()
    """Asset references of embedding models to compare with, or `bm25`."""
    instructions: SortedDict[str, str] = Field(default_factory=dict)
    """Task definition put before the queries of a task and before texts of symmetric tasks, by the
    name of the task or of a type of task (`STS`); as in training. The model is saved with them.
    Tasks left out have what `evaluate_model` puts there: models with an instruction template always
    have one; an empty text: none."""
    validation: ValidationConfig | None = None
    """Scores while training goes on, by which weights are chosen; None: there are none."""
    guard: GuardConfig | None = None
    """Keeps the trained model or a mixture with its start, whichever gains most on own data and
    loses less on the mean of general tasks; None: the trained model is kept, whatever its
    scores."""

    @model_validator(mode="after")
    def _instructions_have_no_side(self) -> "EvaluationConfig":
        own = {own.name for own in self.own_sets}
        for name in self.instructions:
            task = name.removesuffix("-query").removesuffix("-document")
            if task != name and name not in own:
                raise ValueError(
                    f"evaluation.instructions names {name!r}, one side of {task!r}; a model is "
                    f"saved with what stands before queries and texts of symmetric tasks, under "
                    f"{task!r}; what stands before documents is its document prefix, or data sets' "
                    "document_instruction"
                )
        return self

    @property
    def num_mixtures(self) -> int:
        """Number of mixtures that the guard has made and scored."""
        return 0 if self.guard is None else len(self.guard.mixed)


def own_sets_of(guard: GuardConfig, evaluation: EvaluationConfig) -> tuple[str, ...]:
    """Names of the own sets that are own data."""
    if guard.own_sets is not None:
        return guard.own_sets
    return tuple(s.name for s in evaluation.own_sets if not s.path.startswith(SAMPLE))


def check_guard(guard: GuardConfig, evaluation: EvaluationConfig, holds_out: bool) -> None:
    """Return when there are own data to compare models on.

    Args:
        holds_out: whether a data set of the run holds a part out.

    Raises:
        ValueError: there is not; the message says what to set.
    """
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
            "evaluation.guard compares models on own data, and nothing is held out; set "
            "evaluation.guard=null too, or name judged sets of your own in evaluation.own_sets, or "
            "hold a part out (data.datasets.NAME.held_out={kind: fraction})"
        )

"""Scores while training goes on: of what, how often, and what they decide."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.own_sets import OwnSet, kinds_by_default
from rayembed.config.settings import Settings, nearest
from rayembed.config.types import PlainName, Reference, SortedDict, unique_names


class MtebValidation(Settings):
    """Tasks of NanoBEIR: 50 queries and some thousand documents each, from the hub.

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
        """Names of the scored tasks."""
        return self.tasks

    @model_validator(mode="after")
    def _instructions_are_of_tasks(self) -> "MtebValidation":
        check_names("instructions", self.instructions, self.tasks)
        return self


class BeirValidation(Settings):
    """Queries, documents and judgements of the user's own, in BEIR's layout."""

    kind: Literal["beir"] = "beir"
    path: Reference
    """Folder with `corpus`, `queries` and `qrels` (JSONL, TSV, CSV or Parquet), local, `s3://…` or
    `gs://…`; a relative path is taken from `data.root`."""
    split: str = "dev"
    """Split of judgements, read from `qrels/<split>.tsv`."""
    name: PlainName = "validation"
    """Name that its score goes by."""
    instruction: str = ""
    """Task definition put before queries; empty: what an evaluation of the model puts there, for
    models with an instruction template general words."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the scored tasks."""
        return (self.name,)


class OwnSetsValidation(Settings):
    """Own sets of any kind, which the scores after training should not be taken on."""

    kind: Literal["own_sets"] = "own_sets"
    sets: Annotated[tuple[OwnSet, ...], kinds_by_default, unique_names("own sets")] = Field(
        min_length=1
    )
    """The sets, small ones; a relative path is taken from `data.root`. What stands before their
    texts is as in the scores after training."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the scored tasks."""
        return tuple(own.name for own in self.sets)


class HeldOutValidation(Settings):
    """The held-out parts of the run's data sets, which the scores after training are taken on too.

    Whatever is chosen by them (with `keep: best` a step, in a sweep also the trial) was chosen by
    the texts that its score is reported of, which flatters it; where that matters, report it on
    texts of another kind.
    """

    kind: Literal["held_out"] = "held_out"


class EarlyStoppingConfig(Settings):
    """Rule by which a stage ends before its last step."""

    patience: PositiveInt = 3
    """Scores in a row, by step, that were no improvement; a checkpoint without a score counts
    neither way."""
    min_delta: float = Field(default=0.0, ge=0.0)
    """Gain over the best score before it that a score must exceed to be an improvement."""


class ValidationConfig(Settings):
    """Scores of a stage's weights as they were every so many steps, taken beside the training."""

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
    """Weights that a stage hands on: those of its best score (of equal ones the first), or those of
    its last step, whatever the scores."""
    early_stopping: EarlyStoppingConfig | None = None
    """Early stopping; None: every stage runs to its last step."""

    @model_validator(mode="after")
    def _fits(self) -> "ValidationConfig":
        if not isinstance(self.data, HeldOutValidation):  # whose names the run knows
            check_names("weights", self.weights, self.data.task_names)
        if self.early_stopping is not None and self.keep == "last":
            raise ValueError(
                "early_stopping with keep 'last' would hand on the weights of the step at which "
                "training happened to stop, which depends on how fast scores came; set keep=best"
            )
        return self


def check_names(
    setting: str, given: dict[str, float] | dict[str, str], names: tuple[str, ...]
) -> None:
    """Return when a setting names tasks of the validation alone.

    Raises:
        ValueError: it names another one; the message has the nearest.
    """
    for name in given:
        if name not in names:
            raise ValueError(f"{setting} names {name!r}, no task of data; {nearest(name, names)}")

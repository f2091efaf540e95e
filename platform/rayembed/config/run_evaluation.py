"""The evaluation of a training run: what its models are scored on, and beside which others."""

from typing import Any

from pydantic import Field, model_validator

from rayembed.config.scores import WIKIPEDIA, Scores
from rayembed.config.types import Reference, SortedDict
from rayembed.config.validation import ValidationConfig, WikipediaValidation

_MOVED = {
    "suite": "evaluation.benchmarks ([wikipedia] for 'wikipedia', [] for 'none')",
    **{
        name: f"evaluation.wikipedia.{name}"
        for name in ("num_documents", "num_queries", "max_length", "source", "translations")
    },
}
"""Settings of earlier versions → where they stand now."""


class EvaluationConfig(Scores):
    """Scores that a run takes, and the other models beside which they stand."""

    before_training: bool = True
    """Whether the untrained model is scored for comparison."""
    baselines: tuple[Reference, ...] = ()
    """Asset references of embedding models to compare with, or `bm25`."""
    instructions: SortedDict[str, str] = Field(default_factory=dict)
    """Task definition put before the queries of a task, by the task's name; as in training. The
    model is saved with them. Tasks left out have what `evaluate_model` puts there: models with an
    instruction template always have one; an empty text: none."""
    validation: ValidationConfig | None = None
    """Scores while training goes on, by which weights are chosen; None: there are none."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, values: Any) -> Any:
        moved = [name for name in _MOVED if isinstance(values, dict) and name in values]
        if moved:
            told = "; ".join(f"evaluation.{name} is now {_MOVED[name]}" for name in moved)
            raise ValueError(f"written for an earlier version of rayembed: {told}")
        return values

    @property
    def num_validation_titles(self) -> int:
        """How many held-out titles are kept from the scores after training."""
        data = None if self.validation is None else self.validation.data
        return data.num_titles if isinstance(data, WikipediaValidation) else 0

    @property
    def scores_wikipedia(self) -> bool:
        """Whether the tasks of the Wikipedia sample are scored after training."""
        return WIKIPEDIA in self.benchmarks

    @property
    def uses_wikipedia(self) -> bool:
        """Whether the Wikipedia sample's held-out titles are scored, after training or during."""
        return self.scores_wikipedia or self.num_validation_titles > 0

    @model_validator(mode="after")
    def _titles_are_the_runs(self) -> "EvaluationConfig":
        for name, owner in (
            ("num_titles", "data.held_out.num_titles"),
            ("first_title", "data.held_out.num_titles"),
            ("seed", "seed"),
        ):
            if getattr(self.wikipedia, name) != type(self.wikipedia).model_fields[name].default:
                raise ValueError(
                    f"evaluation.wikipedia.{name} is for evaluations of their own; in a training "
                    f"run {owner} decides which titles are held out"
                )
        return self

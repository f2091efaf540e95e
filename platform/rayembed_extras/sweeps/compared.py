"""What a sweep asks of the runs that it compares, of either kind."""

from collections.abc import Collection
from typing import Any

from rayembed.config.run import without_general
from rayembed_extras.adaptation.settings import Adaptation, AnyRun


def scores_while_training(run: AnyRun) -> bool:
    """Whether weights are scored while the training goes on: by validation, or on what an
    adaptation holds out.
    """
    if isinstance(run, Adaptation):
        return run.training.held_out is not None
    return run.evaluation.validation is not None


def first_score(run: AnyRun) -> int:
    """Step of the first score."""
    if isinstance(run, Adaptation):
        held_out = run.training.held_out
        return (held_out.every_steps if held_out else None) or run.training.steps
    stage = run.stages[0]
    return run.validation_interval(stage) if scores_while_training(run) else stage.steps


def compared_as(run: AnyRun, name: str, weighted: Collection[str] = ()) -> AnyRun:
    """The run under another name with what a sweep compares and nothing more.

    Baselines, the untrained model, the guard's mixtures and its general tasks are left out: they
    would be scored anew for each trial.

    Args:
        weighted: names of the tasks that the sweep's metric weights, general ones among them.
    """
    changes: dict[str, Any] = {"name": name}
    if not isinstance(run, Adaptation):
        only = {"baselines": (), "before_training": False, "guard": None}
        compared = without_general(run, weighted)
        changes["evaluation"] = compared.model_copy(update=only)
    return run.model_copy(update=changes)


def scored_on(run: AnyRun) -> dict[str, Any]:
    """What decides the scores that are compared, beside the weights; of adaptations which words."""
    if isinstance(run, Adaptation):
        training = run.training.model_dump(mode="json", include={"held_out", "global_sequences"})
        corpus = run.corpus.model_dump(mode="json", exclude={"root"})
        return {"tokens": run.model.backbone.path, "corpus": corpus, **training}
    return run.evaluation.model_dump(mode="json", exclude={"baselines", "before_training"})

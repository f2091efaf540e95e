"""A trial of a sweep: train its run, report its scores, at last that of what it leaves."""

from collections.abc import Callable, Mapping

from rayembed.assets.storage import join
from rayembed.config.run import Run
from rayembed.config.sweep import Sweep, deciding, metric_source
from rayembed.errors import ArtifactError
from rayembed.pipeline.train import TrialOf, TrialResult, train_trial
from rayembed.pipeline.validation import SCORE, kept_step
from rayembed.training.validation.folder import ValidationFolder
from rayembed.tuning.events import Event
from rayembed.tuning.trials import Trial


def run_trial(
    sweep: Sweep, trial: Trial, tags: Mapping[str, str], tell: Callable[[Event], None]
) -> None:
    """Return when the trial's run is trained; `tell` has got every score, the final one last.

    Raises:
        RayembedError: as `train`; or the weights that the run hands on have no score.
    """
    run, validated = trial.run, metric_source(sweep) == "validation"

    def on_scores(name: str, scores: dict[str, float], step: int) -> None:
        if validated and name == "validation":
            tell(Event("score", step, deciding(sweep, scores), scores))

    trained = train_trial(run, TrialOf(tags, on_scores))
    scores = _of_kept_weights(run, trained) if validated else trained.scores
    total = sum(stage.steps for stage in run.stages)
    tell(Event("final", total, deciding(sweep, scores), scores, trained.scores))


def _of_kept_weights(run: Run, trained: TrialResult) -> dict[str, float]:
    """Validation's scores of the weights that the last stage hands on, with their mean."""
    stage = run.stages[-1]
    step = int(kept_step(trained.last_weights) or stage.steps)
    folder = join(run.placement.storage_path, "runs", run.name, stage.name)
    record = ValidationFolder(folder).read(step)
    if record is None or record.score is None:
        why = "there is no record of it" if record is None else record.problem
        raise ArtifactError(
            f"the weights of step {step} of {run.name!r}, which the stage {stage.name!r} hands on, "
            f"have no validation score: {why}; the trial cannot be compared"
        )
    return {**record.scores, SCORE: record.score}

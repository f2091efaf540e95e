"""A trial of a sweep: train its run, report its scores, at last that of what it leaves."""

from collections.abc import Callable, Mapping

from rayembed.assets.storage import join
from rayembed.config.sweep import Sweep, deciding, metric_source
from rayembed.errors import ArtifactError
from rayembed.pipeline.population_scores import PopulationScores
from rayembed.pipeline.train import TrialOf, TrialResult, train_trial
from rayembed.pipeline.validation import SCORE, kept_step
from rayembed.training.validation.folder import ValidationFolder
from rayembed.tuning.events import Event, Start


def run_trial(
    sweep: Sweep, start: Start, tags: Mapping[str, str], tell: Callable[[Event], None]
) -> None:
    """Return when the trial's run is trained; `tell` has got every score, the final one last.

    Raises:
        RayembedError: as `train`; or the weights that the run hands on have no score.
    """
    validated = metric_source(sweep) == "validation"

    def train_and(tell_score: Callable[[Event], None]) -> TrialResult:
        def on_scores(name: str, scores: dict[str, float], step: int) -> None:
            if validated and name == "validation":
                tell_score(Event("score", step, deciding(sweep, scores), scores))

        return train_trial(start.run, TrialOf(tags, on_scores, start.checkpoint))

    if sweep.scheduler.kind == "pbt":
        with PopulationScores(start, tell) as population:
            trained = train_and(population.tell)
    else:
        trained = train_and(tell)
    scores = _of_kept_weights(start, trained) if validated else trained.scores
    total = sum(stage.steps for stage in start.run.stages)
    tell(Event("final", total, deciding(sweep, scores), scores, trained.scores))


def _of_kept_weights(start: Start, trained: TrialResult) -> dict[str, float]:
    """Validation's scores of the weights that the last stage hands on, with their mean."""
    run, stage = start.run, start.run.stages[-1]
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

"""Run training runs as trials of a sweep: check, prepare data, train, and register the best one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayembed.assets.storage import join
from rayembed.config.data_run import data_of
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.data.engine.on_ray import ray_pipeline_context
from rayembed.data.prepare import prepare
from rayembed.display.progress import overview
from rayembed.errors import ArtifactError
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import ScoreKey
from rayembed.models.contract import PromptTokenizer
from rayembed.pipeline.checks.model import check_inputs, check_row_instructions
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.held_out import held_out_sets
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.pipeline.run.report import Outcome
from rayembed.pipeline.run.train import TrialOf, claimed_run, phases, train, train_claimed
from rayembed.pipeline.run.validation import SCORE, check_validated, kept_step
from rayembed.registry.tracking import Tracker
from rayembed.training.checkpoints.checkpoint_list import remove_states
from rayembed.training.validation.folder import ValidationFolder
from rayembed_extras.sweeps.settings import Sweep, deciding, metric_source
from rayembed_extras.sweeps.space import apply
from rayembed_extras.sweeps.trial_store import Event, TrialRecord
from rayembed_extras.sweeps.trials import Trial, counted


def check_runs(runs: Sequence[Run]) -> dict[str, PromptTokenizer]:
    """Check the assets of all runs, equal ones once; return tokenizers by the fingerprint from
    `_assets`.

    Raises:
        RayembedError: as `check_inputs`.
    """
    tokenizers: dict[str, PromptTokenizer] = {}
    for run in runs:
        key = _assets(run)
        if key not in tokenizers:
            tokenizers[key] = check_inputs(run)
    return tokenizers


def prepare_runs(runs: Sequence[Run]) -> list[list[str]]:
    """Prepare the data of runs whose data differ; return the plan folders of each run.

    Raises:
        RayembedError: as `prepare`, or what is held out is too large to be scored in training.
    """
    tokenizers = check_runs(runs)
    found = []
    for run in runs:
        plans = prepare(run, ray_pipeline_context(data_of(run)))
        check_row_instructions(run, plans, tokenizers[_assets(run)])
        check_validated(run, held_out_sets(run, plans))
        found.append(list(plans.values()))
    return found


def _assets(run: Run) -> str:
    """Fingerprint of all settings whose assets `check_inputs` examines."""
    return fingerprint(run.model_dump(mode="json", include={"model", "data", "evaluation"}))


@dataclass(frozen=True)
class _Trained:
    run: Run
    """The run as it was trained, with the steps of its plans."""
    scores: dict[str, float]
    """Scores of its last stage on the tasks after training; empty without them."""
    last_weights: str
    """Path of the last stage's weights, in storage."""


def run_trial(
    sweep: Sweep, trial: Trial, tags: Mapping[str, str], tell: Callable[[Event], None]
) -> None:
    """Train the trial's run, and report every score to a callback, the final one last.

    It is not registered. Where another process trains it, its end is waited for.

    Raises:
        RayembedError: as `train`; or the weights that the run hands on have no score.
    """
    validated = metric_source(sweep) == "validation"

    def on_scores(name: str, scores: dict[str, float], step: int) -> None:
        if validated and name == "validation":
            tell(Event("score", step, deciding(sweep, scores), scores))

    with claimed_run(trial.run, wait=True) as (run, folders), overview(phases(run)):
        trial_of = TrialOf(tags, on_scores)
        trained, _ = train_claimed(run, folders, _trained, OnRay(), trial_of)
        remove_states(run, folders.storage)
    scores = _of_kept_weights(trained) if validated else trained.scores
    tell(Event("final", trained.run.total_steps, deciding(sweep, scores), scores, trained.scores))


def _trained(
    run: Run,
    folders: RunFolders,
    _tracker: Tracker,
    scores: dict[ScoreKey, ModelScores],
    _found: Mapping[str, Any],
) -> _Trained:
    last = run.stages[-1].name
    scored = scores.get(ScoreKey(last))
    return _Trained(run, scored.scores if scored else {}, folders.weights(last))


def register_best(sweep: Sweep, found: TrialRecord) -> Outcome:
    """Score the best trial's trained run next to its baselines and register it; return the outcome.

    Raises:
        RayembedError: as `train`.
    """
    run = counted(apply(sweep.runs[found.label], found.values))
    name = run.placement.registered_model or sweep.name
    placement = run.placement.model_copy(update={"registered_model": name})
    return train(run.model_copy(update={"name": found.key, "placement": placement}))


def _of_kept_weights(trained: _Trained) -> dict[str, float]:
    """Read the validation scores, and their mean, of the weights that the last stage exports."""
    run = trained.run
    stage = run.stages[-1]
    step = int(kept_step(trained.last_weights) or stage.steps)
    folder = join(run.placement.storage_path, "runs", run.name, stage.name)
    record = ValidationFolder(folder).read(step)
    if record is None or record.score is None:
        why = "there is no record of it" if record is None else record.problem
        raise ArtifactError(
            f"the trial cannot be compared: the weights of step {step} of {run.name!r}, which the "
            f"stage {stage.name!r} exports, have no validation score: {why}"
        )
    return {**record.scores, SCORE: record.score}

"""Train a run, from its settings to a registered model: check, prepare, train, score, register."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import file_name, write_atomic
from rayembed.config.data_run import data_of
from rayembed.config.reports import MIRRORS, check_mirrors
from rayembed.config.run import Run
from rayembed.data.epochs import resolve, with_planned_steps
from rayembed.data.plan.audit import (
    data_provenance,
    data_warnings,
    rejected_rows,
    teacher_provenance,
)
from rayembed.data.prepare import prepare
from rayembed.data.sources.check import check_files_at_hand
from rayembed.data.sources.file_rows import ResolvedDataset
from rayembed.display.progress import enter, overview
from rayembed.display.tables import show
from rayembed.errors import ConfigError
from rayembed.evaluation.plots import loss_curve, score_bars
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import UNTRAINED, ScoreKey, score_csv, score_table
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.files import weights_fingerprint
from rayembed.pipeline.checks.model import (
    check_inputs,
    check_instructions_at_hand,
    check_row_instructions,
)
from rayembed.pipeline.checks.precision import as_begun
from rayembed.pipeline.evaluate.findings import (
    Finding,
    ScoredModels,
    log_findings,
    make_findings,
)
from rayembed.pipeline.evaluate.general_tasks import other_language, with_fitting_tasks
from rayembed.pipeline.evaluate.guard import judge, mixtures, remove_mixtures, share_of
from rayembed.pipeline.evaluate.run_scorer import RunScorer
from rayembed.pipeline.register.registration import Training, register_trained
from rayembed.pipeline.run.folders import RunFolders, locked_folders, plan_of
from rayembed.pipeline.run.held_out import HeldOutSet, held_out_sets, with_sets
from rayembed.pipeline.run.report import (
    Outcome,
    gains_table,
    print_outcome,
    scores_table,
    without_hybrids_of_others,
)
from rayembed.pipeline.run.runtime import Runtime, runtime_of, started
from rayembed.pipeline.run.validation import (
    VALIDATION_FILE,
    check_validated,
    kept_step,
    read_validation_log,
    validation_log,
    validation_of,
    write_validation_log,
)
from rayembed.pipeline.storage import placed
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog, dropped_steps
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.registered_model import pinned_models
from rayembed.registry.run_folder import check_run_folder
from rayembed.registry.tracking import Tracker
from rayembed.registry.tracking_uri import reachable_tracking_uri
from rayembed.training.checkpoints.checkpoint_list import newest_step, remove_states
from rayembed.training.checkpoints.export import export
from rayembed.training.job import StageJob
from rayembed.training.trainer import Callback

logger = logging.getLogger(__name__)

T = TypeVar("T")

Tell = Callable[[str, dict[str, float], int], None]
"""Takes the name of a curve (`validation`, `eval`), scores and the step of the run."""

End = Callable[[Run, RunFolders, Tracker, dict[ScoreKey, ModelScores], Mapping[str, Any]], T]
"""Makes of a run's scores and its provenance what the caller wants."""


START, DATA, MIXTURES, REGISTRY = "start", "data", "mixtures", "registry"
"""Phases of runs, beside those of their stages."""


@dataclass(frozen=True)
class TrialOf:
    """Additions of a sweep to a run that is one of its trials: tags, and a callback for scores."""

    tags: Mapping[str, str]
    """Tags of its MLflow run: the sweep, and the trial's settings."""
    on_scores: Tell
    """Callback for scores as soon as they are known; scores of an earlier process are repeated."""


def train(run: Run, *, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Train or resume a run, print its table, and return its result.

    Everything that a user can get wrong is checked before a worker starts.

    Args:
        callbacks: further ones of the trainer of each stage, on every worker.

    Raises:
        RayembedError: what is wrong and what to do; the MLflow run is then marked as failed.
    """
    if not run.model.embeds:
        raise ConfigError(
            f"the run {run.name!r} has model.kind {run.model.kind!r}, which gives no vectors, so "
            "it cannot be scored and registered as an embedding model; train it with the job of "
            "its kind (rayembed --help lists all)"
        )
    with claimed_run(run, wait=False) as (claimed, folders):
        runtime = runtime_of(run.placement)
        guarded = [MIXTURES] if run.evaluation.guard is not None else []
        with overview([*phases(run), *guarded, REGISTRY]):
            end = partial(_register, runtime)
            outcome, complete = train_claimed(claimed, folders, end, runtime, None, callbacks)
        remove_states(claimed, folders.storage)  # only now: what a later call reads is in storage
        print_outcome(outcome, mlflow_complete=complete)
        return outcome


def phases(run: Run) -> list[str]:
    """Names of a run's phases up to its last score, in order, for the progress overview."""
    scored = [UNTRAINED.model] if run.evaluation.before_training else []
    phases = [START, DATA, *map(_scores_of, scored if run.takes_scores else [])]
    for stage in run.stages:
        phases += [stage.name, *([_scores_of(stage.name)] if run.takes_scores else [])]
    return phases


def _scores_of(name: str) -> str:
    """Name of the phase in which a model is scored."""
    return f"{name} scores"


@contextmanager
def claimed_run(run: Run, *, wait: bool) -> Iterator[tuple[Run, RunFolders]]:
    """Context manager that makes the run's storage path absolute, pins registered models and locks
    the run's folders; yields the run and the folders.

    Args:
        wait: for the process that has them, instead of refusing.
    """
    with (
        pinned_models(placed(resolve(run))) as pinned,
        locked_folders(pinned, wait=wait) as folders,
    ):
        yield pinned, folders


def train_claimed(
    run: Run,
    folders: RunFolders,
    end: End[T],
    runtime: Runtime,
    trial: TrialOf | None,
    callbacks: Sequence[Callback] = (),
) -> tuple[T, bool]:
    """Train and score a run whose folders are locked; return the result of `end`, and whether
    MLflow has all data.
    """
    run = as_begun(run, folders.local)
    if check_run_folder(folders.local, run, place=folders.storage):
        logger.info("run %s resumes in the folder %s", run.name, folders.storage)
    tracking_uri = reachable_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    tokenizer, sources = _checked(run)
    validates = run.evaluation.validation is not None
    run = started(run, runtime, validates=validates, is_trial=trial is not None)
    enter(DATA)
    plans = prepare(run, runtime.data_context(data_of(run)), sources)
    run = with_planned_steps(run, plans)
    check_row_instructions(run, plans, tokenizer)
    held_out = held_out_sets(run, plans)
    run = with_fitting_tasks(run, held_out)
    check_validated(run, held_out)
    runtime.check(run.placement, validates=validates)
    # Only now the name is taken: a mistake in the settings must not use it up.
    folders.claim(run, plans)
    tags = {} if trial is None else trial.tags
    tracker = Tracker.open_for_run(run, tracking_uri, folders.local, tags=tags)
    metrics = MetricsLog(folders.local / METRICS_FILE)
    with folders.kept(), tracker, ExitStack() as stack:
        opens = [MIRRORS.get(name).open for name in run.placement.mirrors]
        mirrors = [one(run, folders.local, metrics.path) for one in opens]
        for mirror in mirrors:
            stack.callback(mirror.close)
        found = collect_provenance(runtime.hardware(run.placement))
        found["plans"] = {stage: file_name(plan) for stage, plan in plans.items()}
        found["data"] = {stage: data_provenance(plan) for stage, plan in plans.items()}
        found |= provenance_of_teachers(run, plans)
        found |= {
            "data_warnings": _of_plans(data_warnings, plans),
            "rejected_rows": _of_plans(rejected_rows, plans),
        }
        found["held_out"] = [{"summary": one.summary, "path": one.path} for one in held_out]
        found["general_tasks"] = other_language(run, held_out)
        tracker.log_resolved_run(run.published())
        tracker.log_provenance(found)
        tracker.start_forwarding(metrics)

        def tell(name: str, values: dict[str, float], step: int) -> None:
            tracker.log_scores(name, values, step)
            for mirror in mirrors:
                mirror.log_scores(name, values, step)
            if trial is not None:
                trial.on_scores(name, values, step)

        scores = _train_and_score(
            run, plans, held_out, folders, tracker, runtime, tell, trial, callbacks
        )
        outcome = end(run, folders, tracker, scores, found)
    return outcome, tracker.complete


def _checked(run: Run) -> tuple[PromptTokenizer, list[ResolvedDataset]]:
    """Check everything that can be checked before Ray starts; return the run's tokenizer and data
    files.
    """
    check_mirrors(run.placement.mirrors)
    sources = check_files_at_hand(run)
    tokenizer = check_inputs(run)
    check_instructions_at_hand(run, tokenizer)
    return tokenizer, sources


def _train_and_score(
    run: Run,
    plans: Mapping[str, str],
    held_out: Sequence[HeldOutSet],
    folders: RunFolders,
    tracker: Tracker,
    runtime: Runtime,
    tell: Tell,
    trial: TrialOf | None,
    callbacks: Sequence[Callback],
) -> dict[ScoreKey, ModelScores]:
    """Train the stages; return the scores of the untrained model, of each stage's model and of the
    baselines, none without tasks.
    """
    scores: dict[ScoreKey, ModelScores] = {}
    scorer = RunScorer(with_sets(run, held_out), folders, runtime)
    if run.takes_scores and run.evaluation.before_training:
        enter(_scores_of(UNTRAINED.model))
        runtime.export(export, run, None, folders.model(UNTRAINED.model))
        scores[UNTRAINED] = scorer.score(UNTRAINED)
        tell("eval", scores[UNTRAINED].scores, 0)
        folders.files.keep()
    start_weights, offset = None, 0
    for index, stage in enumerate(run.stages):
        weights = folders.weights(stage.name)
        validation = validation_of(run, held_out, offset, tell)
        place = folders.stage(stage.name)
        job = StageJob(
            run,
            index,
            plans[stage.name],
            start_weights,
            weights,
            validated_in=None if validation is None else place,
            callbacks=tuple(callbacks),
        )
        begun = stage.steps if job.is_done() else newest_step(place)
        enter(stage.name, f"{begun}/{stage.steps}")
        runtime.train(
            job,
            place,
            folders.local / METRICS_FILE,
            offset,
            metrics_place=folders.metrics,
            validation=validation,
        )
        if validation is not None:
            lines = validation_log(run, folders.stage)
            write_validation_log(lines, folders.local / VALIDATION_FILE)
            kept = kept_step(weights) or str(stage.steps)
            tracker.set_tags({f"rayembed.kept_step.{stage.name}": kept})
        offset += stage.steps
        runtime.export(export, run, weights, folders.model(stage.name))
        if run.takes_scores:
            enter(_scores_of(stage.name))
            key = ScoreKey(stage.name)
            scores[key] = scorer.score(key)
            tell("eval", scores[key].scores, offset)
        folders.files.keep()
        start_weights = weights
    if run.evaluation.guard is not None:
        enter(MIXTURES)
        scores |= mixtures(run, folders, scorer, runtime)
    if run.takes_scores:
        scores |= scorer.further(lambda name, values: tell(name, values, offset))
    return scores


def provenance_of_teachers(run: Run, plans: Mapping[str, str]) -> dict[str, Any]:
    """Provenance of the teachers that the run's stages use; empty without teachers."""
    found: dict[str, Any] = {}
    if any(stage.teachers for stage in run.stages):
        found["teachers"] = {stage: teacher_provenance(plan) for stage, plan in plans.items()}
    of_states = {
        stage.name: {
            "teacher": stage.hidden_states.teacher,
            "weights": weights_fingerprint(resolve_model(stage.hidden_states.teacher)),
        }
        for stage in run.stages
        if stage.hidden_states is not None
    }
    return {**found, "teachers_of_hidden_states": of_states} if of_states else found


def _register(
    runtime: Runtime,
    run: Run,
    folders: RunFolders,
    tracker: Tracker,
    scores: dict[ScoreKey, ModelScores],
    found: Mapping[str, Any],
) -> Outcome:
    """Write plots, tables and the model card, register the model, and return the run's outcome."""
    enter(REGISTRY)
    trained = ScoreKey(run.stages[-1].name)
    verdict = judge(run, scores, found["general_tasks"])
    kept = trained if verdict is None else verdict.kept
    model = folders.model(kept.model)
    scores = without_hybrids_of_others(scores, kept)
    table = scores_table(run, scores)
    markdown = show(score_table(table), "markdown") if scores else ""
    findings: tuple[Finding, ...] = ()
    if scores:
        markdown += f"\n{show(gains_table(run, scores), 'markdown')}"
        markdown += "".join(f"\n{one['summary']}\n" for one in found["held_out"])
        if verdict is not None:
            gains = show(verdict.table([stage.name for stage in run.stages]), "markdown")
            markdown += f"\n{gains}\nGuard: {verdict.summary}\n"
        findings = _findings(runtime, run, folders, scores, kept)
        markdown += "".join(f"\n{one.section}" for one in findings if one.section)
        log_findings(findings, tracker, run.total_steps, scores[kept].local)
        write_atomic(folders.local / "scores.md", markdown.encode())
        write_atomic(folders.local / "scores.csv", score_csv(table).encode())
        score_bars(table, folders.local / "scores.png")
        for name in ("scores.md", "scores.csv", "scores.png"):
            tracker.log_artifact(folders.local / name)
    loss_curve(
        MetricsLog(folders.local / METRICS_FILE).records(),
        folders.local / "loss.png",
        validation=read_validation_log(folders.local / VALIDATION_FILE),
    )
    tracker.log_artifact(folders.local / "loss.png")
    if (folders.local / VALIDATION_FILE).exists():
        tracker.log_artifact(folders.local / VALIDATION_FILE)
    scored = scores.get(kept)
    version = register_trained(
        Training(run, found, markdown, share_of(kept)),
        model,
        tracker,
        scored.local if scored else None,
        may_be_candidate=kept != UNTRAINED,
    )
    if verdict is not None:
        remove_mixtures(run, folders, kept)
    return Outcome(
        run=run,
        scores=scores,
        model_folder=model,
        run_folder=folders.storage,
        version=version,
        tracking_uri=tracker.tracking_uri,
        dropped_steps=dropped_steps(MetricsLog(folders.local / METRICS_FILE).records()),
        data_warnings=tuple(found["data_warnings"]),
        rejected=tuple(found["rejected_rows"]),
        held_out=tuple(f"{one['summary']} ({one['path']})" for one in found["held_out"]),
        verdict=verdict,
        findings=findings,
    )


def _findings(
    runtime: Runtime,
    run: Run,
    folders: RunFolders,
    scores: Mapping[ScoreKey, ModelScores],
    kept: ScoreKey,
) -> tuple[Finding, ...]:
    """Run the analyses of scores on the kept model, and return their findings."""
    stages = [stage.name for stage in run.stages]
    subject = ScoredModels(
        {key.label(stages): scored for key, scored in scores.items()},
        kept.label(stages),
        UNTRAINED.label(stages) if UNTRAINED in scores else None,
        folders.model(kept.model),
        run.placement.storage_path,
        run,
        {stage: plan_of(run, stage) for stage in stages},
        runtime.data_context(data_of(run)).execute,
    )
    return make_findings(subject, run.placement.findings)


def _of_plans(lines: Callable[[str], list[str]], plans: Mapping[str, str]) -> list[str]:
    """Collect the distinct texts that the function `lines` returns for the folders of all batch
    plans.
    """
    return list(dict.fromkeys(line for plan in plans.values() for line in lines(plan)))

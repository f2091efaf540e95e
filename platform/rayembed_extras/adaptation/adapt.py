"""An adaptation from its settings to an encoder that nomic-moe starts from."""

import logging
import shlex
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.display.progress import enter, overview
from rayembed.display.tables import console
from rayembed.errors import RayembedError
from rayembed.evaluation.plots import loss_curve
from rayembed.pipeline.checks.precision import as_begun
from rayembed.pipeline.run.folders import RunFolders, locked_folders
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.pipeline.run.report import MLFLOW_AWAY, dropped_line
from rayembed.pipeline.run.runtime import Runtime, runtime_of, started
from rayembed.pipeline.run.train import DATA, START, Tell, TrialOf
from rayembed.pipeline.run.validation import SCORE
from rayembed.pipeline.storage import placed
from rayembed.registry.metrics_log import METRICS_FILE, LogReader, MetricsLog, record_of
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.run_folder import check_run_folder
from rayembed.registry.tracking import Tracker
from rayembed.registry.tracking_uri import reachable_tracking_uri
from rayembed.training.checkpoints.checkpoint_list import newest_step, remove_states
from rayembed_extras.adaptation.encoder import check_adaptable
from rayembed_extras.adaptation.make import find_corpus, prepare_sequences
from rayembed_extras.adaptation.masked import HELD_OUT, PERPLEXITY, AdaptationJob, export_encoder
from rayembed_extras.adaptation.plan import SequencePlan
from rayembed_extras.adaptation.settings import Adaptation
from rayembed_extras.adaptation.tables import corpus_table

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0

_PERPLEXITY = f"{HELD_OUT}/{PERPLEXITY}/"

ENCODER = "encoder"
"""Name of the folder that a run leaves its encoder in."""


@dataclass(frozen=True)
class AdaptedEncoder:
    """Encoder that an adaptation made."""

    run: Adaptation
    folder: str
    """Folder in storage: a path or an address, for `model.backbone.path`."""
    metrics: dict[str, Any]
    """Metrics of the last step."""


def adapt(run: Adaptation) -> AdaptedEncoder:
    """Run an adaptation or resume it; return the encoder after its tables were printed.

    Everything that a user can get wrong is checked before a worker starts.

    Raises:
        RayembedError: what is wrong and what to do; the MLflow run is then marked as failed.
    """
    run = placed(run)
    with locked_folders(run) as folders, overview(_phases(run)):
        outcome, plan, complete = _adapt(run, folders, runtime_of(run.placement))
    _print(outcome, plan, mlflow_complete=complete)
    return outcome


def adapt_trial(run: Adaptation, trial: TrialOf) -> AdaptedEncoder:
    """Run an adaptation on Ray as a trial of a sweep, or resume it; the encoder.

    Where another process runs it, its end is waited for.

    Raises:
        RayembedError: as `adapt`.
    """
    run = placed(run)
    with locked_folders(run, wait=True) as folders, overview(_phases(run)):
        return _adapt(run, folders, OnRay(), trial)[0]


def check_encoder(run: Adaptation) -> None:
    """Fetch the run's encoder and check that it can be adapted.

    Raises:
        RayembedError: it cannot be had, or is of no family that can.
    """
    check_adaptable(resolve_model(run.model.backbone.path), run.model)


def held_out_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Probability that a masked held-out word is given, the geometric mean over words (1 /
    perplexity), by language, and as `score` the mean of languages; empty where the metrics of a
    step have none.
    """
    found = {
        name.removeprefix(_PERPLEXITY): 1 / float(value)
        for name, value in metrics.items()
        if name.startswith(_PERPLEXITY)
    }
    return {**found, SCORE: fmean(found.values())} if found else {}


def _phases(run: Adaptation) -> list[str]:
    return [START, DATA, run.training.name, ENCODER]


def _adapt(
    run: Adaptation, folders: RunFolders, runtime: Runtime, trial: TrialOf | None = None
) -> tuple[AdaptedEncoder, SequencePlan, bool]:
    """The encoder, the plan of its training, and whether MLflow has everything."""
    run = as_begun(run, folders.local)
    if check_run_folder(folders.local, run, place=folders.storage):
        logger.info("run %s goes on in %s", run.name, folders.storage)
    tracking_uri = reachable_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    check_encoder(run)
    run = started(run, runtime, is_trial=trial is not None)
    enter(DATA)
    context = PipelineContext(run.placement.storage_path, run.seed, runtime.execute)
    plan = SequencePlan.open(prepare_sequences(run, context, find_corpus(run)))
    runtime.check(run.placement)
    # Only now the name is taken: a mistake in the settings must not use it up.
    folders.claim(run, {run.training.name: plan.files.folder})
    tracker = Tracker.open_for_run(
        run, tracking_uri, folders.local, tags=trial.tags if trial else {}
    )
    with folders.kept(), tracker:
        found = collect_provenance(runtime.hardware(run.placement))
        found["data"] = dict(plan.manifest)
        tracker.log_resolved_run(run.published())
        tracker.log_provenance(found)
        tracker.start_forwarding(MetricsLog(folders.local / METRICS_FILE))
        outcome = _train(run, plan, folders, tracker, runtime, trial)
    remove_states(run, folders.storage)  # only now: what a later call reads is in storage
    return outcome, plan, tracker.complete


def _train(
    run: Adaptation,
    plan: SequencePlan,
    folders: RunFolders,
    tracker: Tracker,
    runtime: Runtime,
    trial: TrialOf | None,
) -> AdaptedEncoder:
    stage = run.training.name
    weights, encoder = folders.weights(stage), folders.model(ENCODER)
    log = MetricsLog(folders.local / METRICS_FILE)
    enter(stage, f"{newest_step(folders.stage(stage))}/{run.training.steps}")
    with ExitStack() as stack:
        if trial is not None:
            stack.enter_context(_scores_told(log, trial.on_scores))
        runtime.train(
            AdaptationJob(run, plan.files.folder, weights),
            folders.stage(stage),
            log.path,
            0,
            metrics_place=folders.metrics,
        )
    enter(ENCODER)
    runtime.export(export_encoder, run, weights, encoder)
    loss_curve(log.records(), folders.local / "loss.png")
    tracker.log_artifact(folders.local / "loss.png")
    tracker.set_tags({"rayembed.encoder": encoder})
    last = log.last(stage)
    return AdaptedEncoder(run, encoder, {} if last is None else last)


@contextmanager
def _scores_told(log: MetricsLog, on_scores: Tell) -> Iterator[None]:
    """Tell the scores in the log, and while the block trains each that comes, in a thread; also
    those that came last where the block fails.

    Of a step that is taken again after a resume the first score counts; the two differ by rounding.
    """
    reader, told, done = LogReader(log.path, record_of), 0, threading.Event()

    def tell() -> None:
        nonlocal told
        for record in reader.read():
            if record["step"] > told and (scores := held_out_scores(record)):
                told = record["step"]
                on_scores("validation", scores, told)

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            try:
                tell()
            except RayembedError as error:
                logger.warning("scores are looked for again: %s", error)

    thread = threading.Thread(target=watch, name="scores", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        tell()


def _print(outcome: AdaptedEncoder, plan: SequencePlan, *, mlflow_complete: bool) -> None:
    """Print what was drawn of each language, what came of it, and what to run next."""
    out = console(soft_wrap=True)
    out.print(corpus_table(plan.languages_told, outcome.metrics))
    if not mlflow_complete:
        out.print(MLFLOW_AWAY)
    if dropped := int(outcome.metrics.get("dropped_steps", 0)):
        out.print(dropped_line(dropped))
    out.print(f"Encoder {outcome.folder}; next: {next_command(outcome)}")


def next_command(outcome: AdaptedEncoder) -> str:
    """The command that pretrains a mixture of experts from the encoder."""
    recipe = "nomic-v2-moe" if outcome.run.placement.on_gpu else "nomic-quickstart"
    words = [f"rayembed train --recipe {recipe}"]
    settings = {"model.backbone.path": outcome.folder}
    base = outcome.run.model.rotary_base
    if base != type(outcome.run.model).model_fields["rotary_base"].default:
        settings["model.rotary_base"] = f"{base:g}"
    words += [f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items()]
    return " ".join(words)

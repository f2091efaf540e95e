"""Run an adaptation from its settings and return an encoder from which nomic-moe training can
start.
"""

import logging
import shlex
from dataclasses import dataclass
from typing import Any

from rayembed.assets.resolver import resolve_model
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.display.progress import enter, overview
from rayembed.display.tables import console
from rayembed.evaluation.plots import loss_curve
from rayembed.pipeline.checks.precision import as_begun
from rayembed.pipeline.run.folders import RunFolders, locked_folders
from rayembed.pipeline.run.report import MLFLOW_AWAY, dropped_line
from rayembed.pipeline.run.runtime import Runtime, runtime_of, started
from rayembed.pipeline.run.train import DATA, START
from rayembed.pipeline.storage import placed
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.run_folder import check_run_folder
from rayembed.registry.tracking import Tracker
from rayembed.registry.tracking_uri import reachable_tracking_uri
from rayembed.training.checkpoints.checkpoint_list import newest_step, remove_states
from rayembed_extras.adaptation.encoder import check_adaptable
from rayembed_extras.adaptation.make import prepare_sequences
from rayembed_extras.adaptation.masked import AdaptationJob, export_encoder
from rayembed_extras.adaptation.plan import SequencePlan
from rayembed_extras.adaptation.settings import Adaptation
from rayembed_extras.adaptation.tables import corpus_table

logger = logging.getLogger(__name__)

ENCODER = "encoder"
"""Name of the encoder's folder within the run's folder."""


@dataclass(frozen=True)
class AdaptedEncoder:
    """Result of an adaptation: the trained encoder and where it is stored."""

    run: Adaptation
    folder: str
    """Folder in storage: a path or an address, for `model.backbone.path`."""
    metrics: dict[str, Any]
    """Metrics of the last step."""


def adapt(run: Adaptation) -> AdaptedEncoder:
    """Run or resume an adaptation, print its tables and return the encoder.

    Everything that a user can get wrong is checked before a worker starts.

    Raises:
        RayembedError: what is wrong and what to do; the MLflow run is then marked as failed.
    """
    run = placed(run)
    with locked_folders(run) as folders, overview([START, DATA, run.training.name, ENCODER]):
        outcome, plan, complete = _adapt(run, folders, runtime_of(run.placement))
    _print(outcome, plan, mlflow_complete=complete)
    return outcome


def _adapt(
    run: Adaptation, folders: RunFolders, runtime: Runtime
) -> tuple[AdaptedEncoder, SequencePlan, bool]:
    """Train the encoder; return it, its sequence plan and whether MLflow received everything."""
    run = as_begun(run, folders.local)
    if check_run_folder(folders.local, run, place=folders.storage):
        logger.info("run %s resumes in the folder %s", run.name, folders.storage)
    tracking_uri = reachable_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    check_adaptable(resolve_model(run.model.backbone.path), run.model)
    run = started(run, runtime)
    enter(DATA)
    context = PipelineContext(run.placement.storage_path, run.seed, runtime.execute)
    plan = SequencePlan.open(prepare_sequences(run, context))
    runtime.check(run.placement)
    # Only now the name is taken: a mistake in the settings must not use it up.
    folders.claim(run, {run.training.name: plan.files.folder})
    tracker = Tracker.open_for_run(run, tracking_uri, folders.local, tags={})
    with folders.kept(), tracker:
        found = collect_provenance(runtime.hardware(run.placement))
        found["data"] = dict(plan.manifest)
        tracker.log_resolved_run(run.published())
        tracker.log_provenance(found)
        tracker.start_forwarding(MetricsLog(folders.local / METRICS_FILE))
        outcome = _train(run, plan, folders, tracker, runtime)
    remove_states(run, folders.storage)  # only now: what a later call reads is in storage
    return outcome, plan, tracker.complete


def _train(
    run: Adaptation,
    plan: SequencePlan,
    folders: RunFolders,
    tracker: Tracker,
    runtime: Runtime,
) -> AdaptedEncoder:
    stage = run.training.name
    weights, encoder = folders.weights(stage), folders.model(ENCODER)
    log = MetricsLog(folders.local / METRICS_FILE)
    enter(stage, f"{newest_step(folders.stage(stage))}/{run.training.steps}")
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


def _print(outcome: AdaptedEncoder, plan: SequencePlan, *, mlflow_complete: bool) -> None:
    """Print the number of sequences drawn for each language, the final metrics and the next
    command.
    """
    out = console(soft_wrap=True)
    out.print(corpus_table(plan.language_counts, outcome.metrics))
    if not mlflow_complete:
        out.print(MLFLOW_AWAY)
    if dropped := int(outcome.metrics.get("dropped_steps", 0)):
        out.print(dropped_line(dropped))
    out.print(f"Encoder {outcome.folder}; next: {next_command(outcome)}")


def next_command(outcome: AdaptedEncoder) -> str:
    """Return the shell command that trains a mixture of experts from the adapted encoder."""
    recipe = "nomic-v2-moe" if outcome.run.placement.on_gpu else "nomic-quickstart"
    words = [f"rayembed train --recipe {recipe}"]
    settings = {"model.backbone.path": outcome.folder}
    base = outcome.run.model.rotary_base
    if base != type(outcome.run.model).model_fields["rotary_base"].default:
        settings["model.rotary_base"] = f"{base:g}"
    words += [f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items()]
    return " ".join(words)

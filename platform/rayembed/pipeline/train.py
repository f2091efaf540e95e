"""A run from its settings to a registered model: check, prepare, train, score, register."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from rayembed.assets.cache import cache_folder
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import (
    check_writable,
    exists,
    is_remote,
    join,
    read_bytes,
    write_atomic,
)
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.run import Run
from rayembed.data.on_ray import prepare_data
from rayembed.data.plan.lineage import data_provenance
from rayembed.errors import ArtifactError
from rayembed.evaluation.on_ray import evaluate_on_ray
from rayembed.evaluation.plots import loss_curve, score_bars
from rayembed.evaluation.tables import ScoreTable, csv_table, markdown_table
from rayembed.models.export import SETTINGS_FILE, saved_dimensions
from rayembed.models.fingerprints import weights_fingerprint
from rayembed.pipeline.checks import check_inputs, check_row_instructions
from rayembed.pipeline.on_ray import connect
from rayembed.pipeline.report import Outcome, print_outcome
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.model_card import CARD_FILE, instruction_template, model_card
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.register import RegisteredVersion, register
from rayembed.registry.run_folder import check_run_folder, claim_run_folder
from rayembed.registry.tracking import Status, Tracker
from rayembed.registry.tracking_uri import check_reachable, resolve_tracking_uri
from rayembed.training.on_ray import (
    check_placement,
    export_on_ray,
    train_stage_on_ray,
    worker_hardware,
)
from rayembed.training.worker import StageJob

logger = logging.getLogger(__name__)

BASE = "untrained"
"""Label of the model before training."""


@dataclass
class _Folders:
    """Where a run's parts lie: `storage` for every node, `local` on the driver's machine.

    They are one folder when storage is on disk. With object storage `local` has the small files
    that are appended to, and `files` carries them there and back.
    """

    files: StoredFolder

    @property
    def storage(self) -> str:
        return self.files.place

    @property
    def local(self) -> Path:
        return self.files.local

    @property
    def results(self) -> str:
        return join(self.storage, "evaluation")

    @property
    def metrics(self) -> str | None:
        remote = is_remote(self.storage)
        return join(self.storage, METRICS_FILE) if remote else None

    def stage(self, name: str) -> str:
        return join(self.storage, name)

    def weights(self, name: str) -> str:
        return join(self.storage, name, "weights.safetensors")

    def model(self, name: str) -> str:
        return join(self.storage, "models", name)


def train(run: Run) -> Outcome:
    """What came of the run, after its table was printed; a run that stopped goes on.

    Everything that a user can get wrong is checked before a worker starts.

    Raises:
        RayembedError: what is wrong and what to do; the MLflow run is then marked as failed.
    """
    storage = absolute_storage(run.placement.storage_path)
    placement = run.placement.model_copy(update={"storage_path": storage})
    run = run.model_copy(update={"placement": placement})
    folders = _folders(run)
    folders.local.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folders.local}.lock")
    try:
        with lock.acquire(timeout=0):
            folders.files.fetch()
            return _train(run, folders)
    except Timeout:
        raise ArtifactError(
            f"another job trains the run {run.name!r} in {str(folders.local)!r} right now; wait "
            "for it, stop it (`ray job stop`), or give this run another --name"
        ) from None


def _train(run: Run, folders: _Folders) -> Outcome:
    if check_run_folder(folders.local, run, place=folders.storage):
        logger.info("run %s goes on in %s", run.name, folders.storage)
    tracking_uri = resolve_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    check_reachable(tracking_uri)
    connect()
    check_placement(run.placement)
    tokenizer = check_inputs(run)
    plans = prepare_data(run)
    check_row_instructions(run, plans, tokenizer)
    # Only now the name is taken: a mistake in the settings must not use it up.
    claim_run_folder(folders.local, run)
    folders.files.keep()
    tracker = Tracker.open_for_run(run, tracking_uri, folders.local, tags={})
    metrics = MetricsLog(folders.local / METRICS_FILE)
    status: Status = "FAILED"
    try:
        found = collect_provenance(worker_hardware(run.placement))
        found["data"] = {stage: data_provenance(plan) for stage, plan in plans.items()}
        tracker.log_resolved_run(run.to_yaml())
        tracker.log_provenance(found)
        tracker.start_forwarding(metrics)
        scores = _train_and_score(run, plans, folders, tracker)
        outcome = _register(run, folders, tracker, scores, found)
        status = "FINISHED"
    finally:
        complete = tracker.close(status)
        _keep_at_the_end(folders, status)
    print_outcome(outcome, mlflow_complete=complete)
    return outcome


def _keep_at_the_end(folders: _Folders, status: Status) -> None:
    """Copy the small files to storage; what made the run fail stays the error that is told."""
    try:
        folders.files.keep()
    except ArtifactError as error:
        if status == "FINISHED":
            raise
        logger.warning("%s", error)


def _folders(run: Run) -> _Folders:
    """The run's folders, after the storage was found writable."""
    storage = run.placement.storage_path
    check_writable(storage)
    place = join(storage, "runs", run.name)
    if not is_remote(storage):
        return _Folders(StoredFolder(place, Path(place)))
    key = hashlib.sha256(place.encode()).hexdigest()[:12]
    return _Folders(StoredFolder(place, cache_folder() / "runs" / f"{run.name}-{key}"))


def _train_and_score(
    run: Run, plans: Mapping[str, str], folders: _Folders, tracker: Tracker
) -> dict[str, dict[str, float]]:
    """Scores by label: the untrained model, each stage, the baselines."""
    scores: dict[str, dict[str, float]] = {}
    scored = run.evaluation.suite != "none"
    if scored and run.evaluation.before_training:
        scores[BASE] = _score(run, BASE, None, folders)
        tracker.log_scores("eval", scores[BASE], 0)
        folders.files.keep()
    start_weights, offset = None, 0
    for index, stage in enumerate(run.stages):
        weights = folders.weights(stage.name)
        job = StageJob(run, index, plans[stage.name], start_weights, weights)
        train_stage_on_ray(
            job,
            folders.stage(stage.name),
            folders.local / METRICS_FILE,
            offset,
            metrics_place=folders.metrics,
        )
        offset += stage.steps
        if scored:
            scores[f"stage {index + 1}: {stage.name}"] = _score(run, stage.name, weights, folders)
            tracker.log_scores("eval", scores[f"stage {index + 1}: {stage.name}"], offset)
        else:
            export_on_ray(run, weights, folders.model(stage.name))
        folders.files.keep()
        start_weights = weights
    if scored:
        for reference in run.evaluation.baselines:
            label = _baseline_name(reference)
            logger.info("scoring %s for comparison", label)
            scores[label] = _evaluate(run, reference, label, folders)
    return scores


def _score(run: Run, name: str, weights: str | None, folders: _Folders) -> dict[str, float]:
    logger.info("scoring %s", name)
    model = folders.model(name)
    export_on_ray(run, weights, model)
    return _evaluate(run, model, f"{run.name}-{name}", folders)


def _evaluate(run: Run, reference: str, name: str, folders: _Folders) -> dict[str, float]:
    placement = run.placement
    return evaluate_on_ray(
        reference,
        run,
        name=name,
        results_folder=folders.results,
        num_cpus=placement.cpus_per_worker,
        num_gpus=1.0 if placement.use_gpu else 0.0,
        num_threads=placement.threads_per_worker,
    )


def _register(
    run: Run,
    folders: _Folders,
    tracker: Tracker,
    scores: dict[str, dict[str, float]],
    found: Mapping[str, object],
) -> Outcome:
    """The outcome, after plots, tables, model card and registration."""
    last = run.stages[-1].name
    model = folders.model(last)
    table = ScoreTable(scores, base=BASE if BASE in scores else None)
    if scores:
        (folders.local / "scores.md").write_text(markdown_table(table), encoding="utf-8")
        (folders.local / "scores.csv").write_text(csv_table(table), encoding="utf-8")
        score_bars(table, folders.local / "scores.png")
        for name in ("scores.md", "scores.csv", "scores.png"):
            tracker.log_artifact(folders.local / name)
    loss_curve(MetricsLog(folders.local / METRICS_FILE).records(), folders.local / "loss.png")
    tracker.log_artifact(folders.local / "loss.png")
    dimensions = saved_dimensions(resolve(join(model, SETTINGS_FILE)))
    card = model_card(
        run,
        dimensions=dimensions[0],
        scores=markdown_table(table) if scores else "",
        provenance=found,
        registered_model=run.placement.registered_model or run.name,
    )
    _write_if_other(join(model, CARD_FILE), card.encode())
    version = _register_version(run, resolve_model(model), tracker, scores, dimensions)
    return Outcome(
        run=run,
        table=table if scores else None,
        model_folder=model,
        run_folder=folders.storage,
        version=version,
        tracking_uri=tracker.tracking_uri,
    )


def _write_if_other(path: str, data: bytes) -> None:
    """Write the file unless it holds the data: a model with a new file is fetched again."""
    if exists(path) and read_bytes(path) == data:
        return
    try:
        write_atomic(path, data)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {path!r}: {error}; correct the storage, then submit the run again"
        ) from error


def _register_version(
    run: Run,
    folder: Path,
    tracker: Tracker,
    scores: dict[str, dict[str, float]],
    dimensions: tuple[int, ...],
) -> RegisteredVersion:
    last = f"stage {len(run.stages)}: {run.stages[-1].name}"
    return register(
        folder,
        run.placement.registered_model or run.name,
        tracker=tracker,
        scores=scores.get(last, {}),
        weights_fingerprint=weights_fingerprint(folder),
        dimensions=dimensions,
        instruction_template=instruction_template(run.model),
        global_step=sum(stage.steps for stage in run.stages),
        tags={},
    )


def _baseline_name(reference: str) -> str:
    """A short name of a baseline: the last part of its reference that says something."""
    if reference == "bm25":
        return "BM25"
    path = reference.partition("?")[0]
    parts = [part for part in path.split("/") if part not in ("", "model", "pypi:", "hf:")]
    return parts[-1].partition("==")[0].partition("@")[0].replace("gt_", "").replace("_", "-")

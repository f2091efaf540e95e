"""Access versions in MLflow's registry by reference: metadata, scores, folder."""

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayembed.assets.cache import cache_folder, filled
from rayembed.assets.folder_formats import PROOF_FOLDER
from rayembed.assets.names import below, folder_name
from rayembed.assets.resolver import resolve_model
from rayembed.config.credentials import check_address
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.config.stage import StageConfig
from rayembed.errors import ArtifactError, ConfigError, TrackingError
from rayembed.registry.aliases import CANDIDATE, CHAMPION, PREVIOUS
from rayembed.registry.gates import summary
from rayembed.registry.mlflow_run import (
    METRICS_PER_BATCH,
    allowed_key,
    as_tracking_error,
    find_model_versions,
    open_client,
)
from rayembed.registry.register import MODEL_ID_TAG, WEIGHTS_TAG
from rayembed.registry.tracking_uri import resolve_tracking_uri, sqlite_path
from rayembed.results.scores import TaskScore, from_json, to_json

SCHEME = "models:/"

_ADDRESS = "MLFLOW_TRACKING_URI"

SCORES_FILE = "scores.json"
"""Artifact with all scores of a version and what they were measured on."""

_REFERENCE = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[\w-]+)|/(?P<number>\d+))")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelReference:
    """Reference to a version of a registered model, by number or alias."""

    name: str
    number: int | None
    alias: str | None


def parse_reference(reference: str) -> ModelReference:
    """Parse `models:/name@alias` or `models:/name/3`.

    Raises:
        ConfigError: not of the form.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"cannot read the registered model {reference!r}; write models:/name@alias or "
            "models:/name/version"
        )
    number = match["number"]
    return ModelReference(match["name"], int(number) if number else None, match["alias"])


def connect(tracking_uri: str, *, made: bool = True) -> Any:
    """Open an MLflow client for the registry, after checking that the registry is
    reachable.

    Args:
        tracking_uri: as `resolve_tracking_uri` gives it.
        made: whether the store must be there; a SQLite file is made otherwise.

    Raises:
        TrackingError: it is away, or there is no such SQLite file.
    """
    database = sqlite_path(tracking_uri)
    if made and database is not None and not database.is_file():
        raise TrackingError(
            f"there is no MLflow database {str(database)!r}; name the MLflow that has the model "
            "(sqlite:///path/to/mlflow.db, http://host:port): --tracking-uri, or in Python output="
        )
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    return open_client(tracking_uri)


def get_version(client: Any, reference: ModelReference) -> Any:
    """Look up the `ModelVersion` of a reference in MLflow.

    Raises:
        ArtifactError: no such model, version or alias; the message tells what there is.
    """
    from mlflow.exceptions import MlflowException

    name = reference.name
    try:
        if reference.alias is not None:
            return client.get_model_version_by_alias(name, reference.alias)
        return client.get_model_version(name, str(reference.number))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
    numbers = sorted(int(v.version) for v in find_model_versions(client, name))
    if not numbers:
        raise ArtifactError(f"MLflow has no registered model {name!r} with a version")
    aliases = client.get_registered_model(name).aliases
    told = ", ".join(f"{alias} (version {number})" for alias, number in sorted(aliases.items()))
    asked = f"alias {reference.alias!r}" if reference.alias else f"version {reference.number}"
    raise ArtifactError(
        f"the registered model {name!r} has no {asked}; it has the versions {numbers} and the "
        f"aliases {told or 'none'}{_advice(reference, numbers[-1])}"
    )


def _advice(reference: ModelReference, newest: int) -> str:
    """Sentence that says why a model may lack one of rayembed's aliases, and what to do."""
    newest_version = f"{SCHEME}{reference.name}/{newest}"
    if reference.alias == CANDIDATE:
        return (
            ". The guard of a run that keeps its start, and a registration without scores, set no "
            f"{CANDIDATE}: take {newest_version}, or run the training again with "
            "--set evaluation.guard.take=1, which takes the trained model"
        )
    if reference.alias in (CHAMPION, PREVIOUS):
        return f". Only promotions set it: rayembed register --model {newest_version} --promote"
    return ""


def pinned_reference(reference: str, tracking_uri: str | None) -> str:
    """Replace an alias by its version, `models:/name/version`; other references stay unchanged.

    An alias may move while a job runs.

    Raises:
        RayembedError: as `find_folder`.
    """
    if not reference.startswith("models:"):
        return reference
    asked = parse_reference(reference)
    _, version, _ = _find(asked, tracking_uri)
    return f"{SCHEME}{asked.name}/{version.version}"


@contextmanager
def pinned_models(run: Run) -> Iterator[Run]:
    """Context manager that yields the run with the versions that registered old models have now.

    Within it `MLFLOW_TRACKING_URI` is the run's MLflow, where teachers are looked up.

    Raises:
        RayembedError: as `find_folder`.
    """
    old = [stage.compatible_with for stage in run.stages]
    if not any(one is not None and one.model.startswith(SCHEME) for one in old):
        yield run
        return
    before, placement = os.environ.get(_ADDRESS), run.placement
    asked = placement.tracking_uri or before
    uri = resolve_tracking_uri(asked, placement.storage_path, make_folder=False)
    os.environ[_ADDRESS] = uri
    try:
        yield changed(run, stages=tuple(_pinned(stage, uri) for stage in run.stages))
    finally:
        if before is None:
            del os.environ[_ADDRESS]
        else:
            os.environ[_ADDRESS] = before


def _pinned(stage: StageConfig, uri: str) -> StageConfig:
    old = stage.compatible_with
    if old is None:
        return stage
    model = pinned_reference(old.model, uri)
    teachers = tuple(changed(teacher, teacher=model) for teacher in stage.teachers)
    return changed(stage, compatible_with=changed(old, model=model), teachers=teachers)


def find_folder(reference: str, tracking_uri: str | None) -> Path:
    """Return the local folder of a model, registered or not; a registered one is downloaded
    once.

    Args:
        tracking_uri: of the MLflow that has a registered one; None: that of `MLFLOW_TRACKING_URI`.

    Raises:
        ArtifactError: no such version, or rayembed did not register it.
        AssetError: the reference leads nowhere.
        ConfigError: not a reference of the registry, or no MLflow to ask.
        TrackingError: MLflow is away or its artifacts cannot be read.
    """
    if not reference.startswith(SCHEME):
        return resolve_model(reference)
    client, version, uri = _find(parse_reference(reference), tracking_uri)
    with as_tracking_error(uri):
        return download(client, version, tracking_uri=uri)


def _find(asked: ModelReference, tracking_uri: str | None) -> tuple[Any, Any, str]:
    """Find the version in MLflow; return the client, the version and MLflow's address."""
    uri = tracking_uri or os.environ.get(_ADDRESS)
    if not uri:
        raise ConfigError(
            f"the model {asked.name!r} is in MLflow's registry, but no tracking address is set; "
            "set MLFLOW_TRACKING_URI (http://host:port or sqlite:///path/to/mlflow.db)"
        )
    check_address(uri, "the address of MLflow")
    client = connect(uri)
    with as_tracking_error(uri):
        return client, get_version(client, asked), uri


def weights_of(version: Any) -> str:
    """Fingerprint of a version's weights, from its tags.

    Raises:
        ArtifactError: rayembed did not register it.
    """
    found = version.tags.get(WEIGHTS_TAG)
    if not found or not version.run_id:
        raise ArtifactError(
            f"version {version.version} of {version.name!r} was not registered by rayembed, so "
            "its scores cannot be stored; register its folder (--model folder)"
        )
    if folder_name(str(found)) != found:
        raise ArtifactError(
            f"version {version.version} of {version.name!r} has the tag {WEIGHTS_TAG} = {found!r}, "
            "which is no fingerprint of weights; register its folder again (--model folder)"
        )
    return str(found)


def version_has_proof(client: Any, version: Any) -> bool:
    """Whether the files of a version have reference vectors (proof)."""
    model_id = version.tags.get(MODEL_ID_TAG)
    if not model_id:
        return False
    folders = client.list_logged_model_artifacts(model_id, "artifacts")
    return any(
        client.list_logged_model_artifacts(model_id, f"{folder.path}/{PROOF_FOLDER}")
        for folder in folders
    )


def read_scores(client: Any, version: Any) -> tuple[TaskScore, ...]:
    """Read the scores stored with a version; empty if there are none.

    Raises:
        ArtifactError: they cannot be read, or rayembed did not register the version.
    """
    place = _score_place(version)
    if not any(
        file.path == place for file in client.list_artifacts(version.run_id, _folder(place))
    ):
        return ()
    with tempfile.TemporaryDirectory(prefix="scores-") as scratch:
        path = client.download_artifacts(version.run_id, place, scratch)
        return from_json(Path(path).read_text(encoding="utf-8"))


def keep_scores(
    client: Any, version: Any, scores: Sequence[TaskScore], files: Path | None, *, step: int = 0
) -> tuple[TaskScore, ...]:
    """Merge new scores into the scores stored with the version, and return all.

    They become metrics `model/<task>`, `model/category/<category>` and `model/mean` (of own and
    general tasks `model/mean/own` and `model/mean/general`) of its run and of its logged model,
    tags `score.…` of the version, and artifacts. Doing it twice adds nothing.

    Args:
        files: folder with the result files that the scores were read from; kept as they are.
        step: of the run after which the model is, for metrics of a version without any.
    """
    kept = {score.task: score for score in read_scores(client, version)}
    kept |= {score.task: score for score in scores}
    merged = tuple(kept[task] for task in sorted(kept))
    place = _score_place(version)
    client.log_text(version.run_id, to_json(merged), place)
    if files is not None:
        client.log_artifacts(version.run_id, str(files), f"{_folder(place)}/results")
    figures = summary(merged)
    _log_metrics(client, version, figures, step)
    for name, value in figures.items():
        key, text = allowed_key(f"score.{name}"), f"{value:.6g}"
        if version.tags.get(key) != text:
            client.set_model_version_tag(version.name, str(version.version), key, text)
    return merged


def _log_metrics(client: Any, version: Any, figures: dict[str, float], step: int) -> None:
    from mlflow.entities import Metric

    model_id = version.tags.get(MODEL_ID_TAG)
    if model_id:
        metrics_there = client.get_logged_model(model_id).metrics or ()
        there = {metric.key: metric.value for metric in metrics_there}
        step = max((metric.step for metric in metrics_there), default=step)
    else:
        there = client.get_run(version.run_id).data.metrics
    now = int(time.time() * 1000)
    metrics = [
        Metric(key, value, now, step, model_id=model_id, run_id=version.run_id)
        for key, value in ((allowed_key(f"model/{name}"), v) for name, v in figures.items())
        if there.get(key) != value
    ]
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(version.run_id, metrics[start : start + METRICS_PER_BATCH])


def download(client: Any, version: Any, *, tracking_uri: str) -> Path:
    """Download a version's model folder once, and return its local path.

    Raises:
        ArtifactError: it is no model that rayembed registered.
        AssetError: the cache cannot be written.
    """
    store = hashlib.sha256(tracking_uri.encode()).hexdigest()[:12]
    # The model's id, since a name and number can be given again after they were deleted.
    told = version.tags.get(MODEL_ID_TAG) or version.tags.get(WEIGHTS_TAG, "")
    named = folder_name(f"{store}-{version.name}-{version.version}-{told}")
    entry = cache_folder() / "mlflow" / named

    def fill(folder: Path) -> None:
        _logger.info("fetching version %s of %s from MLflow", version.version, version.name)
        _artifacts(client, version).download_artifacts("", str(folder))

    files = filled(entry, fill)
    inside = _model_folder(files / "MLmodel", version)
    return below(
        files, inside, f"the MLmodel file of version {version.version} of {version.name!r}"
    )


def model_settings(client: Any, version: Any) -> dict[str, Any]:
    """Read the registered model's `name`, `dimensions` and `instruction_template` from its MLmodel
    file.

    Raises:
        ArtifactError: it is no model that rayembed registered.
    """
    with tempfile.TemporaryDirectory(prefix="mlmodel-") as scratch:
        path = Path(_artifacts(client, version).download_artifacts("MLmodel", scratch))
        found = _function(path, version).get("config")
    return dict(found) if isinstance(found, dict) else {}


def _artifacts(client: Any, version: Any) -> Any:
    """Artifact repository of MLflow that holds a version's model."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    source = client.get_model_version_download_uri(version.name, str(version.version))
    if source.startswith(SCHEME):
        source = client.get_logged_model(source.removeprefix(SCHEME)).artifact_location
    tracking_uri = client.tracking_uri
    return get_artifact_repository(source, tracking_uri=tracking_uri, registry_uri=tracking_uri)


def _model_folder(description: Path, version: Any) -> str:
    """Path of the exported folder within an MLflow model, from its `MLmodel` file."""
    found = _function(description, version).get("artifacts") or {}
    try:
        return str(found["model"]["path"])
    except (KeyError, TypeError):
        raise _foreign(version, "its MLmodel file names no artifact 'model'") from None


def _function(description: Path, version: Any) -> dict[str, Any]:
    try:
        found = yaml.safe_load(description.read_text(encoding="utf-8"))
        return dict(found["flavors"]["python_function"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise _foreign(version, f"its MLmodel file cannot be read ({error!r})") from error


def _foreign(version: Any, seen: str) -> ArtifactError:
    return ArtifactError(
        f"version {version.version} of {version.name!r} is no embedding model that rayembed "
        f"registered: {seen}"
    )


def _score_place(version: Any) -> str:
    return f"scores/{weights_of(version)}/{SCORES_FILE}"


def _folder(place: str) -> str:
    return place.rpartition("/")[0]


def training_run(client: Any, run_id: str) -> Run | None:
    """Read the settings of the run that trained a version; None if they cannot be read."""
    text = artifact_text(client, run_id, "run.yaml")
    if text is None:
        return None
    with tempfile.TemporaryDirectory(prefix="run-") as scratch:
        path = Path(scratch) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return Run.read(path)
        except ConfigError as error:
            _logger.warning("the run.yaml of run %s cannot be read: %s", run_id, error)
            return None


def artifact_text(client: Any, run_id: str, name: str) -> str | None:
    """Text of an artifact in the root folder of an MLflow run; None if it does not exist."""
    if not any(file.path == name for file in client.list_artifacts(run_id)):
        return None
    with tempfile.TemporaryDirectory(prefix="artifact-") as scratch:
        return Path(client.download_artifacts(run_id, name, scratch)).read_text(encoding="utf-8")

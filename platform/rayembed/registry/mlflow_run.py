"""Access to MLflow for tracking: find runs, respect limits on keys and sizes, convert errors."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.errors import ArtifactError, TrackingError
from rayembed.registry.metrics_log import LogReader, Record, append_line
from rayembed.registry.run_folder import refuse_other_run
from rayembed.registry.tracking_uri import (
    check_reachable,
    database_lock,
    half_made,
    limit_retries,
    sqlite_path,
)

FINGERPRINT_TAG = "rayembed.fingerprint"
NOTE_TAG = "mlflow.note.content"
"""MLflow's own tag of a run's description."""
NOTE_OF_TRAINING = (
    "`eval/<task>` scores the model in training: the start at step 0, then each stage's. "
    "`model/<task>` scores the registered model, which may be a mixture of start and trained "
    "model.\nParameters decide results; tags `placement.…` say where and how the run computed."
)

# Limits of MLflow's API (mlflow/utils/validation.py).
METRICS_PER_BATCH = 1000
PARAMS_PER_BATCH = 100
PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 8000

_REFUSED = re.compile(
    r"error code 40[13]\b|40[13] Client Error|UNAUTHENTICATED|PERMISSION_DENIED|not authenticated"
)
"""What MLflow's client says where a server wants another user."""

_OF_TABLES = re.compile(r"already exists|duplicate column|no such (table|column|index)")
"""What SQLite says of tables that were left half made."""

_logger = logging.getLogger(__name__)

Entry = dict[str, Any]
"""One message: `kind` and its fields. Sending it twice is harmless."""


class Outbox:
    """Queue of data to send to MLflow, in a JSONL file; a second file counts the delivered
    entries.

    A process that is killed between telling and counting tells the entry once more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken_path = path.with_suffix(".taken")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            whole = LogReader(path).read()
            write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in whole).encode())
        path.touch()

    def put(self, entry: Entry) -> None:
        """Append one entry to the queue.

        Raises:
            ArtifactError: the file cannot be written.
        """
        try:
            append_line(self._path, json.dumps(entry) + "\n")
        except OSError as error:
            raise ArtifactError(
                f"data for MLflow cannot be written to {str(self._path)!r}: {error}; make room or "
                "correct the permissions, then submit the run again"
            ) from error

    def entries(self) -> list[Entry]:
        """All queued entries, delivered or not, oldest first."""
        return LogReader(self._path).read()

    def waiting(self) -> list[Entry]:
        """Undelivered entries, oldest first."""
        return self.entries()[self._num_taken() :]

    def taken(self) -> None:
        """Mark the oldest undelivered entry as delivered."""
        write_atomic(self._taken_path, str(self._num_taken() + 1).encode())

    def restart(self) -> None:
        """Mark all entries as undelivered, so that another MLflow run gets them."""
        write_atomic(self._taken_path, b"0")

    def _num_taken(self) -> int:
        if not self._taken_path.exists():
            return 0
        return int(self._taken_path.read_text(encoding="utf-8"))


def send_entry(client: Any, run_id: str, entry: Entry, run_folder: Path) -> None:
    """Send one queued entry to MLflow; relative file paths start at the run's folder."""
    from mlflow.entities import Metric, RunTag

    match entry["kind"]:
        case "text":
            client.log_text(run_id, entry["text"], entry["name"])
        case "file":
            path, folder = run_folder / entry["path"], entry["folder"] or None
            if path.is_dir():
                client.log_artifacts(run_id, str(path), folder)
            elif path.exists():
                client.log_artifact(run_id, str(path), folder)
            else:
                _logger.warning("the file %s no longer exists and was not sent to MLflow", path)
        case "scores":
            milliseconds = int(entry["time"] * 1000)
            metrics = [
                Metric(allowed_key(name), value, milliseconds, entry["step"])
                for name, value in entry["values"].items()
            ]
            client.log_batch(run_id, metrics)
        case "tags":
            tags = [RunTag(allowed_key(name), str(v)) for name, v in entry["tags"].items()]
            client.log_batch(run_id, tags=tags)
        case "status":
            client.set_terminated(run_id, entry["status"], int(entry["time"] * 1000))


def log_params(client: Any, run_id: str, params: Mapping[str, Any]) -> None:
    """Log a run's parameters; MLflow keeps the first value of each, and a different later value
    causes a warning.
    """
    from mlflow.entities import Param

    kept = client.get_run(run_id).data.params
    wanted = {allowed_key(name): param_text(value) for name, value in params.items()}
    changed = sorted(name for name in wanted if kept.get(name, wanted[name]) != wanted[name])
    if changed:
        _logger.warning(
            "MLflow keeps the first value of a parameter, so the changed values of these "
            "parameters of the run are not recorded: %s",
            ", ".join(changed),
        )
    new = [Param(name, value) for name, value in wanted.items() if name not in kept]
    for start in range(0, len(new), PARAMS_PER_BATCH):
        client.log_batch(run_id, params=new[start : start + PARAMS_PER_BATCH])


def find_experiment(client: Any, name: str, tracking_uri: str) -> str:
    """Return the id of the experiment, created if missing; with SQLite, artifacts are stored next
    to the database.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"the experiment {name!r} at {tracking_uri} is deleted; restore it (mlflow "
                "experiments restore) or choose another placement.experiment"
            )
        return str(found.experiment_id)
    database = sqlite_path(tracking_uri)
    location = None if database is None else (database.parent / "mlflow_artifacts").as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=location))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # Another process was first.
    return str(client.get_experiment_by_name(name).experiment_id)


def find_run(
    client: Any, experiment: str, experiment_id: str, run_name: str, fingerprint: str
) -> str | None:
    """Return the id of the MLflow run to continue; None if no run has the name."""
    runs = client.search_runs([experiment_id], f"attributes.run_name = {quoted(run_name)}")
    for run in runs:
        if run.data.tags.get(FINGERPRINT_TAG) == fingerprint:
            return str(run.info.run_id)
    if runs:
        refuse_other_run(
            run_name,
            fingerprint,
            runs[0].data.tags.get(FINGERPRINT_TAG),
            f"the MLflow experiment {experiment!r}",
        )
    return None


def find_model_versions(client: Any, name: str) -> list[Any]:
    """List the versions of a registered model; empty if the model does not exist."""
    return list(client.search_model_versions(f"name = {quoted(name)}"))


def quoted(text: str) -> str:
    """Quote a text for an MLflow filter, whose grammar has no escapes.

    Raises:
        TrackingError: it holds both kinds of quotes, which no filter can say.
    """
    for quote in ("'", '"'):
        if quote not in text:
            return f"{quote}{text}{quote}"
    raise TrackingError(
        f"MLflow cannot search for the name {text!r}, because it holds both ' and \" and "
        "MLflow's filters cannot express that; choose a name without one of these quotes"
    )


def batches(records: list[Record]) -> Iterator[list[Record]]:
    """Split records, in order, into batches within MLflow's limit on metrics."""
    batch: list[Record] = []
    size = 0
    for record in records:
        if batch and size + len(record) > METRICS_PER_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += len(record)
    if batch:
        yield batch


def allowed_key(name: str) -> str:
    """Replace characters that MLflow does not allow in keys by `_`."""
    return re.sub(r"[^\w.\-/: ]", "_", name)[:250]


def param_text(value: Any) -> str:
    """Convert a parameter value to a text that is never empty, since MLflow's server rejects empty
    ones.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:PARAM_CHARACTERS] or '""'


def open_client(tracking_uri: str) -> Any:
    """Open an MLflow client, after checking that the tracking store is reachable and has its
    tables.

    The only place that makes a client: the tables of a SQLite file are made or upgraded at its
    first use, one process at a time.

    Args:
        tracking_uri: as `resolve_tracking_uri` gives it.

    Raises:
        TrackingError: MLflow is away, or the tables of its SQLite file are half made.
    """
    limit_retries()
    check_reachable(tracking_uri)
    database = sqlite_path(tracking_uri)
    with as_tracking_error(tracking_uri):
        from alembic.util.exc import CommandError
        from mlflow import MlflowClient
        from sqlalchemy.exc import SQLAlchemyError

        if database is None:
            return MlflowClient(tracking_uri, tracking_uri)
        with database_lock(database):
            try:
                client = MlflowClient(tracking_uri, tracking_uri)
                client.search_registered_models(max_results=1)  # tables of its second store
            except (CommandError, SQLAlchemyError) as error:
                if isinstance(error, SQLAlchemyError) and not _OF_TABLES.search(str(error)):
                    raise  # no room, no rights, or no database
                raise half_made(database, str(error).partition("\n")[0]) from error
        return client


@contextmanager
def as_tracking_error(tracking_uri: str) -> Iterator[None]:
    """Context manager that converts errors of MLflow's client to TrackingError."""
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
        if tracking_uri.startswith("http") and _REFUSED.search(str(error)):
            raise TrackingError(
                f"MLflow at {tracking_uri} requires a user or rejects this user: "
                f"{error}\nSet MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN, in the environment of the job"
            ) from error
        raise TrackingError(f"MLflow at {tracking_uri} failed: {error}") from error

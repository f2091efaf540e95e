"""MLflow address of a run, and a check that it is reachable."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from rayembed.config.credentials import check_address
from rayembed.errors import ConfigError, TrackingError

PROBE_SECONDS = 5
"""Maximum seconds for a server to answer the probe."""

MAX_RETRIES = "3"
"""Retries of one request, about 15 s; MLflow's default of 7 waits for minutes on a dead server."""

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def resolve_tracking_uri(uri: str | None, storage_path: str, *, make_folder: bool = True) -> str:
    """MLflow address that is valid in every process of this machine.

    None is a SQLite file in the storage path. The path of a SQLite file is made absolute, because
    MLflow takes it from each process's working directory.

    Args:
        uri: `placement.tracking_uri`.
        storage_path: `placement.storage_path`.
        make_folder: whether the folder of a SQLite file is made, which a dry run leaves.

    Raises:
        ConfigError: it holds a password or token, MLflow has no such store, or none can be made in
            object storage.
    """
    check_address(uri, "placement.tracking_uri")
    check_address(storage_path, "placement.storage_path")
    if uri is None:
        if "://" in storage_path:
            raise ConfigError(
                f"placement.tracking_uri is not set and placement.storage_path {storage_path!r} is "
                "object storage, where no SQLite file can lie; set placement.tracking_uri to an "
                "MLflow server (http://…) or to sqlite:///… on a disk"
            )
        uri = f"sqlite:///{Path(storage_path).absolute() / 'mlflow.db'}"
    if uri == "databricks" or uri.startswith("databricks://"):
        return uri
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme in ("http", "https") and urlsplit(uri).hostname:
        return uri.rstrip("/")
    if scheme.partition("+")[0] not in _DATABASES:
        raise ConfigError(
            f"placement.tracking_uri = {uri!r} is no MLflow store; allowed: http://host:port, "
            "https://…, sqlite:///path/to/mlflow.db, postgresql://…, mysql://…, databricks"
        )
    if scheme.partition("+")[0] == "sqlite":
        path = sqlite_path(uri)
        if path is None:
            raise ConfigError(
                f"placement.tracking_uri = {uri!r} names no file; write sqlite:///path/to/mlflow.db"
            )
        try:
            if make_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"placement.tracking_uri = {uri!r}: its folder cannot be made: {error}"
            ) from None
        _, question, options = uri.partition("?")
        return f"{scheme}:///{path}{question}{options}"
    return uri


def reachable_tracking_uri(uri: str | None, storage_path: str) -> str:
    """The address of `resolve_tracking_uri`, of a server that answers.

    Raises:
        ConfigError: as `resolve_tracking_uri`.
        TrackingError: as `check_reachable`.
    """
    resolved = resolve_tracking_uri(uri, storage_path)
    check_reachable(resolved)
    return resolved


def sqlite_path(uri: str) -> Path | None:
    """Absolute path of a SQLite address; None for other stores and in-memory databases."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return Path(match[1]).absolute() if match and match[1] != ":memory:" else None


def limit_retries() -> None:
    """Limit MLflow's retries, unless the user's environment sets them."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", MAX_RETRIES)


def check_reachable(uri: str) -> None:
    """Check that the server answers within a few seconds; other stores are not probed.

    Raises:
        TrackingError: no answer, or the answer of a gateway whose server is away.
    """
    if urlsplit(uri).scheme not in ("http", "https"):
        return
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        answer = http_request(
            get_default_host_creds(uri),
            "/health",
            "GET",
            timeout=PROBE_SECONDS,
            max_retries=0,
            raise_on_status=False,
        )
    except MlflowException as error:
        # MLflow's text wraps the whole chain of its HTTP library; the cause stands at its end.
        cause = re.search(r"\[Errno -?\d+\] [^\"')]+", str(error))
        seen = cause[0] if cause else str(error).splitlines()[0]
    else:
        if answer.status_code < 500:
            return
        seen = f"it answered {answer.status_code} {answer.reason}"
    raise TrackingError(
        f"no MLflow server at {uri}: {seen}\nStart it (mlflow server --host … --port …), correct "
        "placement.tracking_uri, or leave that out to track in a SQLite file in the storage path."
    )

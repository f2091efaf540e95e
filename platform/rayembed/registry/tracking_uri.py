"""Determine a run's MLflow address, and check that it is reachable."""

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from rayembed.config.credentials import check_address
from rayembed.errors import ConfigError, TrackingError

PROBE_SECONDS = 5
"""Maximum seconds for a server to answer the probe."""

MAX_RETRIES = "3"
"""Retries of one request, about 15 s; MLflow's default of 7 waits for minutes on a dead server."""

LOCK_SECONDS = 300
"""Maximum seconds to wait for another process that makes the tables of a SQLite file."""

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def resolve_tracking_uri(uri: str | None, storage_path: str, *, make_folder: bool = True) -> str:
    """Return the run's MLflow address in a form that is valid in every process of this
    machine.

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
                "object storage, which cannot hold a SQLite file; set placement.tracking_uri to an "
                "MLflow server (http://…) or to sqlite:///… on a disk"
            )
        uri = sqlite_uri(Path(storage_path).absolute() / "mlflow.db")
    if uri == "databricks" or uri.startswith("databricks://"):
        return uri
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme in ("http", "https") and urlsplit(uri).hostname:
        return uri.rstrip("/")
    if scheme.partition("+")[0] not in _DATABASES:
        raise ConfigError(
            f"placement.tracking_uri = {uri!r} is not an MLflow address; allowed: "
            "http://host:port, https://…, sqlite:///path/to/mlflow.db, postgresql://…, mysql://…, "
            "databricks"
        )
    if scheme.partition("+")[0] == "sqlite":
        path = sqlite_path(uri)
        if path is None:
            raise ConfigError(
                f"placement.tracking_uri = {uri!r} names no database file; write "
                "sqlite:///path/to/mlflow.db"
            )
        try:
            if make_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"placement.tracking_uri = {uri!r}: its folder cannot be created: {error}"
            ) from None
        return sqlite_uri(path, scheme) + "".join(uri.partition("?")[1:])
    return uri


def reachable_tracking_uri(uri: str | None, storage_path: str) -> str:
    """Return the address of `resolve_tracking_uri`, after checking that its server answers.

    Raises:
        ConfigError: as `resolve_tracking_uri`.
        TrackingError: as `check_reachable`.
    """
    resolved = resolve_tracking_uri(uri, storage_path)
    check_reachable(resolved)
    return resolved


def sqlite_uri(path: Path, scheme: str = "sqlite") -> str:
    """Build the SQLite address of a file, whose path may hold any character.

    SQLAlchemy reads `%` as the beginning of an escape and `?` as the end of the path. MLflow makes
    the folder of a `sqlite:` address as it is written, escapes and all, so such a path has the
    driver in its scheme.
    """
    quoted = str(path).replace("%", "%25").replace("?", "%3F")
    if quoted != str(path) and scheme == "sqlite":
        scheme = "sqlite+pysqlite"
    return f"{scheme}:///{quoted}"


def sqlite_path(uri: str) -> Path | None:
    """Absolute file path of a SQLite address; None for other stores and in-memory databases."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", uri)
    return Path(unquote(match[1])).absolute() if match and match[1] != ":memory:" else None


@contextmanager
def database_lock(path: Path) -> Iterator[None]:
    """Context manager that holds a lock, so that only one process at a time creates or upgrades a
    SQLite file's tables.

    MLflow does so at its first use, and two at once break them. Where no lock can lie beside the
    file, nobody can write the file either.

    Raises:
        TrackingError: another process has the lock for `LOCK_SECONDS`.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise TrackingError(
            f"another process has been creating the tables of {str(path)!r} for "
            f"{LOCK_SECONDS} s; wait for that process or stop it, then run the command again"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield
        return
    try:
        yield
    finally:
        lock.release()


def check_tables(path: Path) -> None:
    """Check that an existing SQLite file is a database with complete tables.

    Raises:
        TrackingError: it is none, or a change of its tables was broken off in the middle.
    """
    if not _unfinished(path):
        return
    with database_lock(path):  # else another process may be at it now
        if (left := _unfinished(path)) is not None:
            raise half_made(path, f"it holds the table {left!r} of an unfinished change")


def half_made(path: Path, seen: str) -> TrackingError:
    """Build the error for a SQLite file whose tables are incomplete, because a process was stopped
    while changing them.
    """
    runs = _first(path, "select count(*) from runs where lifecycle_stage is not null")
    held = "no runs" if not runs else f"{runs} runs"
    kept = "" if not runs else ", put back a copy from before, if there is one"
    return TrackingError(
        f"MLflow's database {str(path)!r} is incomplete: {seen}. A process was stopped while it "
        f"made or changed the tables, and MLflow cannot use it as it is. The file holds {held}. "
        f"Move it away{kept} and give the same command again: it makes a new database where there "
        "is none and writes its run into it. Or set placement.tracking_uri to another one"
    )


def _unfinished(path: Path) -> str | None:
    """Name of a temporary table that an interrupted upgrade left in a SQLite file; None without
    one.
    """
    query = "select name from sqlite_master where name like '\\_alembic\\_tmp\\_%' escape '\\'"
    return None if (name := _first(path, query)) is None else str(name)


def _first(path: Path, query: str) -> Any:
    """First value of a query's result; None without a row, a table or a file.

    Raises:
        TrackingError: the file is no database.
    """
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=1)) as opened:
            row = opened.execute(query).fetchone()
    except sqlite3.OperationalError:  # locked, or no such table
        return None
    except sqlite3.DatabaseError as error:  # MLflow would try for two minutes
        raise TrackingError(
            f"{str(path)!r} is no SQLite database: {error}. Correct placement.tracking_uri, or "
            "move the file away"
        ) from None
    return None if row is None else row[0]


def limit_retries() -> None:
    """Limit the number of MLflow's retries, unless environment variables already set it."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", MAX_RETRIES)


def check_reachable(uri: str) -> None:
    """Check that a server answers within a few seconds, or that a SQLite file is intact.

    Raises:
        TrackingError: no answer, the answer of a gateway whose server is away, or tables that were
            left half made.
    """
    if (database := sqlite_path(uri)) is not None:
        check_tables(database)
    if uri.partition("://")[0] not in ("http", "https"):
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
        if answer.status_code in (401, 403):
            raise TrackingError(
                f"MLflow at {uri} answers {answer.status_code} {answer.reason}. Set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, "
                "in the environment of the job"
            )
        if answer.status_code < 500:
            return
        seen = f"it answered {answer.status_code} {answer.reason}"
    raise TrackingError(
        f"no MLflow server at {uri}: {seen}\nStart it (mlflow server --host … --port …), correct "
        "placement.tracking_uri, or leave that out to track in a SQLite file in the storage path."
    )

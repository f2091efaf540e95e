"""New MLflow stores are copies of one: its own hundred migrations cost 1.5 seconds for each."""

import functools
import shutil
import sqlite3
import tempfile
from pathlib import Path

import mlflow.store.db.utils as db
import mlflow.store.model_registry.sqlalchemy_store as model_registry
import sqlalchemy
import sqlalchemy.event


def copy_new_stores() -> None:
    """From now on an empty SQLite store of this process is filled from a template."""
    db._initialize_tables = _fill
    model_registry._initialize_tables = _fill
    # It reads all migrations again whenever a store is opened.
    db._get_latest_schema_revision = functools.cache(db._get_latest_schema_revision)
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", _never_wait_for_the_disk)


def _never_wait_for_the_disk(connection, _):
    """No test cuts the power: what a killed process has written is there without."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def new_store(path: Path) -> None:
    """An empty store for another process, which finds it as an earlier run would have left it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_template(), path)


_migrate = db._initialize_tables
_folder = tempfile.TemporaryDirectory(prefix="rayembed-mlflow-")


@functools.cache
def _template() -> Path:
    path = Path(_folder.name, "template.db")
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    _migrate(engine)
    engine.dispose()
    return path


def _fill(engine: sqlalchemy.engine.Engine) -> None:
    if engine.url.get_backend_name() != "sqlite" or not engine.url.database:
        _migrate(engine)
        return
    with sqlite3.connect(_template()) as source, sqlite3.connect(engine.url.database) as target:
        source.backup(target)

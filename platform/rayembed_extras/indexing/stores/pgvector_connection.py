"""Connections to a PostgreSQL database with pgvector, and its errors in words without passwords."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from rayembed.errors import ConfigError, RayembedError, StorageError, StorageFullError
from rayembed_extras.indexing.stores import pgvector_columns as columns
from rayembed_extras.indexing.stores.pgvector import PgvectorStore

OLDEST_PGVECTOR = (0, 7, 0)
"""First version with `halfvec` and distances of bits."""
REFUSED = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "permission denied",
    "invalid ",
    "missing ",
)
"""Parts of libpq's messages about a connection that no retry makes."""


class InUseError(ConfigError):
    """Other objects of the database refer to the one to drop."""


class Database:
    """A connection to a database, which is opened again when it was lost."""

    def __init__(self, settings: PgvectorStore) -> None:
        self.schema = settings.schema_name
        self.vector_schema: str | None = None
        """Schema of pgvector's types; None: the database does not have the extension."""
        self.version: tuple[int, ...] = ()
        self.oids: dict[str, int] = {}
        """Oid of each vector type, by its name."""
        self._settings = settings
        try:
            self._address = conninfo_to_dict(settings.to)
        except psycopg.Error as error:
            raise ConfigError(
                f"store.to is not an address that PostgreSQL's client reads: {error}"
            ) from None
        host, port = self._address.get("host", "its default host"), self._address.get("port")
        self.place = (
            f"PostgreSQL at {host}{f':{port}' if port else ''}/{self._address.get('dbname', '')}"
        )
        """Server and database, for messages."""
        self._connection = self.connect()

    def connect(self) -> psycopg.Connection[Any]:
        """Open a further connection.

        Raises:
            ConfigError: address, user or password are wrong.
            StorageError: the server does not answer.
        """
        given: dict[str, Any] = {"application_name": "rayembed"}
        password = self._settings.secret()
        if password is not None:
            given["password"] = password
        with self.translated("the connection"):
            if "connect_timeout" not in self._address:
                given["connect_timeout"] = self._settings.connect_seconds
            # Poolers give each transaction another connection, so nothing is prepared.
            connection = psycopg.connect(
                self._settings.to, autocommit=True, prepare_threshold=None, **given
            )
            self._read_extension(connection)
        return connection

    @contextlib.contextmanager
    def transaction(
        self, what: str, *, writes: bool = False
    ) -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
        """Run statements in one transaction, which sees pgvector's types in any schema.

        Args:
            what: for messages, such as "counting docs_1".
            writes: whether it needs the extension.
        """
        with self.translated(what):
            if self._connection.closed:
                self._connection = self.connect()
            if writes and self.vector_schema is None:
                self.check_extension()
            with self._connection.transaction(), self._connection.cursor(binary=True) as cursor:
                path = quoted(self.vector_schema or "pg_catalog")
                cursor.execute("SELECT set_config('search_path', %s, true)", [path])
                yield cursor

    def check_extension(self) -> None:
        """Raise ConfigError if the database has no usable pgvector, with what to do."""
        if self.vector_schema is None:
            with self.translated("reading extensions"):
                self._read_extension(self._connection)
        if self.vector_schema is None:
            with self.translated("reading extensions"):
                there = self._connection.execute(
                    "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"
                ).fetchone()
            do = (
                "run CREATE EXTENSION vector in it, as a superuser"
                if there
                else "install pgvector on the server (https://github.com/pgvector/pgvector), then "
                "run CREATE EXTENSION vector in the database"
            )
            raise ConfigError(f"{self.place} does not have the extension pgvector: {do}")
        if self.version < OLDEST_PGVECTOR:
            seen, oldest = (".".join(map(str, v)) for v in (self.version, OLDEST_PGVECTOR))
            raise ConfigError(
                f"{self.place} has pgvector {seen}; {oldest} or later is needed: install it on "
                "the server, then run ALTER EXTENSION vector UPDATE"
            )

    def check_schema(self) -> None:
        """Raise ConfigError if the schema of the settings does not exist."""
        with self.transaction("reading schemas") as cursor:
            cursor.execute("SELECT to_regnamespace(%s) IS NULL", [quoted(self.schema)])
            if first(cursor)[0]:
                raise ConfigError(
                    f"{self.place} has no schema {self.schema!r}; create it, or change "
                    "store.schema_name"
                )

    def name(self, table: str) -> sql.Identifier:
        """Quote the name of a table or view, with its schema."""
        return sql.Identifier(self.schema, table)

    def text(self, table: str) -> str:
        """Name of a table or view as `to_regclass` reads it."""
        return f"{quoted(self.schema)}.{quoted(table)}"

    def kind(self, name: str) -> str | None:
        """Return PostgreSQL's letter for the kind of a table or view; None: there is none."""
        with self.transaction(f"reading {name}") as cursor:
            cursor.execute(
                "SELECT relkind::text FROM pg_class WHERE oid = to_regclass(%s)", [self.text(name)]
            )
            row = cursor.fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Raise psycopg's errors as errors of the platform, without passwords."""
        try:
            yield
        except errors.DependentObjectsStillExist as error:
            raise InUseError(self._message(what, error)) from None
        except psycopg.Error as error:
            raise self._error(what, error) from None

    def _read_extension(self, connection: psycopg.Connection[Any]) -> None:
        """Read where pgvector's types are, and let the connection pass them."""
        row = connection.execute(
            "SELECT extversion, nspname FROM pg_extension JOIN pg_namespace ON "
            "pg_namespace.oid = extnamespace WHERE extname = 'vector'"
        ).fetchone()
        if row is None:
            return
        self.version = tuple(int(part) for part in re.findall(r"\d+", row[0]))
        self.vector_schema = row[1]
        rows = connection.execute(
            "SELECT typname, pg_type.oid FROM pg_type JOIN pg_namespace ON pg_namespace.oid = "
            "typnamespace WHERE nspname = %s AND typname IN ('vector', 'halfvec')",
            [self.vector_schema],
        ).fetchall()
        self.oids = {**dict(rows), "bit": columns.BIT_OID}
        columns.register(connection, self.oids)

    def _error(self, what: str, error: psycopg.Error) -> RayembedError:
        message = self._message(what, error)
        if isinstance(error, errors.DiskFull):
            return StorageFullError(f"{message}; free space on the server, then run it again")
        if isinstance(error, errors.InsufficientPrivilege):
            return ConfigError(
                f"{message}; the user must own the index's tables and needs GRANT USAGE, CREATE ON "
                f"SCHEMA {self.schema} and GRANT TEMPORARY ON DATABASE"
            )
        if isinstance(error, errors.CardinalityViolation):
            return ConfigError(f"{message}; ids must be unique")
        if error.sqlstate is None and any(words in str(error) for words in REFUSED):
            return ConfigError(
                f"{message}; check store.to, and give a password by the environment variable "
                f"{self._settings.password_from} or libpq's password file, never in the address"
            )
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StorageError(f"{message}; check that the server runs, then run it again")
        return ConfigError(message)

    def _message(self, what: str, error: psycopg.Error) -> str:
        text = error.diag.message_primary or " ".join(str(error).split())
        return f"{self.place}: {what} failed: {self._settings.without_secrets(text)}"


def quoted(name: str) -> str:
    """Quote an identifier."""
    return sql.Identifier(name).as_string()


def first(cursor: psycopg.Cursor[Any]) -> tuple[Any, ...]:
    """Fetch the row of a query that always has one."""
    row = cursor.fetchone()
    assert row is not None
    return tuple(row)

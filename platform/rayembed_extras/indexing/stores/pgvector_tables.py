"""Client of the vector store `pgvector`: tables of PostgreSQL, and a view for the name of an index.

A table's comment holds its Arrow schema, an index's comment the settings that it was built with.
Parts are written by COPY into a temporary table and one INSERT … ON CONFLICT, sorted by id, so
that writers of the same ids wait for each other instead of blocking each other.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import errors, sql

from rayembed.errors import ArtifactError, ConfigError
from rayembed.machine.quantisation import to_bits
from rayembed_extras.indexing.store import Layout, SearchResults
from rayembed_extras.indexing.stores import layouts, pgvector_columns
from rayembed_extras.indexing.stores.pgvector import PgvectorStore
from rayembed_extras.indexing.stores.pgvector_connection import (
    Database,
    InUseError,
    first,
    quoted,
)
from rayembed_extras.indexing.stores.pgvector_limits import check_limits

BUILD_SETTINGS = ("maintenance_work_mem", "max_parallel_maintenance_workers")
SEARCH_SETTINGS = {
    "ef_search": "hnsw.ef_search",
    "iterative_scan": "hnsw.iterative_scan",
    "max_scan_tuples": "hnsw.max_scan_tuples",
    "probes": "ivfflat.probes",
}
"""Short name of a search option → parameter of the server."""
MAX_EF_SEARCH = 1_000
ROWS_PER_BATCH = 4_096
POINT_SECONDS = 60


class Pgvector:
    """A connection to a PostgreSQL database with pgvector, opened again where it broke."""

    has_parallel_writers: ClassVar[bool] = True

    def __init__(self, settings: PgvectorStore) -> None:
        self._index_settings = dict(settings.index)
        self._db = Database(settings)

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless the database accepts such tables under this name; makes all of them in a
        transaction that is rolled back.
        """
        self._db.check_extension()
        self._db.check_schema()
        check_limits(layout, name, has_index=bool(self._index_settings))
        self._check_free(name)
        probe = f"rayembed_probe_{uuid.uuid4().hex[:12]}"
        with self._db.transaction("a trial of tables and index", writes=True) as cursor:
            self._create(cursor, probe, layout)
            self._index(cursor, probe, layout)
            cursor.execute(self._view_of(f"{probe}_view", probe))
            self._incoming(cursor, probe)
            raise psycopg.Rollback

    def tables(self, name: str) -> list[str]:
        """List the tables of an index."""
        with self._db.transaction("listing tables") as cursor:
            cursor.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) AND relkind "
                "IN ('r', 'p')",
                [quoted(self._db.schema)],
            )
            found = [row[0] for row in cursor.fetchall()]
        numbers = [re.fullmatch(rf"{re.escape(name)}_([1-9][0-9]*)", table) for table in found]
        return [match[0] for match in sorted(filter(None, numbers), key=lambda m: int(m[1]))]

    def create(self, table: str, layout: Layout) -> None:
        """Create an empty table; does nothing if it exists with the same columns."""
        with self._db.transaction(f"creating {table}", writes=True) as cursor:
            if self._db.kind(table) is None:
                self._create(cursor, table, layout)
                return
        layouts.check_layout(table, self._layout(table), layout)

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows, replacing the rows of the same ids."""
        if not len(rows):
            return
        layout = self._layout(table)
        rows = layouts.checked_rows(table, rows, layout)
        values = pgvector_columns.to_rows(rows, layout.dimensions, layout.number_type)
        oid = self._db.oids[pgvector_columns.SQL_VECTORS[layout.number_type]]
        names = [sql.Identifier(name) for name in layout.schema.names]
        with self._db.transaction(f"writing into {table}", writes=True) as cursor:
            incoming = self._incoming(cursor, table)
            with cursor.copy(
                sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
                    incoming, sql.SQL(", ").join(names)
                )
            ) as copy:
                copy.set_types(pgvector_columns.row_types(layout.schema, oid))
                for row in values:
                    copy.write_row(row)
            changes = [
                sql.SQL("{0} = EXCLUDED.{0}").format(name)
                for name in names
                if name != sql.Identifier("id")
            ]
            cursor.execute(
                sql.SQL(
                    "INSERT INTO {0} ({1}) SELECT {1} FROM {2} ORDER BY id "
                    "ON CONFLICT (id) DO UPDATE SET {3}"
                ).format(
                    self._db.name(table), sql.SQL(", ").join(names), incoming,
                    sql.SQL(", ").join(changes),
                )
            )  # fmt: skip

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Delete the rows of these ids."""
        statement = sql.SQL(
            "DELETE FROM {0} USING (SELECT id FROM {0} WHERE id = ANY(%s) ORDER BY id FOR UPDATE) "
            "AS gone WHERE {0}.id = gone.id"
        ).format(self._db.name(table))
        with self._db.transaction(f"deleting from {table}") as cursor:
            for start in range(0, len(ids), 10_000):
                cursor.execute(statement, [list(ids[start : start + 10_000])])

    def finish(self, table: str, layout: Layout) -> None:
        """Build the index by the settings unless it is there, and update the planner's
        statistics.
        """
        with self._db.transaction(f"building the index of {table}", writes=True) as cursor:
            self._index(cursor, table, layout)
            cursor.execute(sql.SQL("ANALYZE {}").format(self._db.name(table)))

    def count(self, table: str) -> int:
        """Count the rows of a table."""
        with self._db.transaction(f"counting {table}") as cursor:
            cursor.execute(sql.SQL("SELECT count(*) FROM {}").format(self._db.name(table)))
            return int(first(cursor)[0])

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows, of one moment, through a cursor on a connection of its own."""
        layout = self._layout(table)
        schema = layout.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        names = sql.SQL(", ").join(sql.Identifier(name) for name in schema.names)
        connection = self._db.connect()
        try:
            with (
                self._db.translated(f"reading {table}"),
                connection.transaction(),
                connection.cursor("rayembed_scan", binary=True) as cursor,
            ):
                cursor.execute(sql.SQL("SELECT {} FROM {}").format(names, self._db.name(table)))
                while rows := cursor.fetchmany(ROWS_PER_BATCH):
                    yield pgvector_columns.from_rows(rows, schema, layout.number_type)
        finally:
            connection.close()

    def fetch(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of these ids."""
        layout = self._layout(table)
        schema = pa.schema([layout.schema.field(name) for name in columns])
        names = sql.SQL(", ").join(sql.Identifier(name) for name in columns)
        statement = sql.SQL("SELECT {} FROM {} WHERE id = ANY(%s)")
        with self._db.transaction(f"reading {table}") as cursor:
            cursor.execute(statement.format(names, self._db.name(table)), [list(ids)])
            rows = cursor.fetchall()
        if not rows:
            return schema.empty_table()
        return pgvector_columns.from_rows(rows, schema, layout.number_type)

    def search(
        self, table: str, queries: np.ndarray, k: int, options: Mapping[str, Any] | None = None
    ) -> SearchResults:
        """Find the k nearest rows; `options`: `ef_search`, `probes`, other parameters by their full
        names, and `exact`, which uses no index. Scores of bits are 1 - 2 × the share of bits that
        differ.
        """
        layout = self._layout(table)
        queries = layouts.checked_queries(table, queries, layout.dimensions)
        chosen = dict(options or {})
        exact = bool(chosen.pop("exact", False))
        parameters = {SEARCH_SETTINGS.get(name, name): value for name, value in chosen.items()}
        is_hnsw = self._index_settings.get("kind") == "hnsw"
        if is_hnsw and k > 40:  # pgvector's default of ef_search, the most rows that it returns
            parameters.setdefault("hnsw.ef_search", min(k, MAX_EF_SEARCH))
        if is_hnsw and k > MAX_EF_SEARCH and self._db.version >= (0, 8, 0):
            parameters.setdefault("hnsw.iterative_scan", "strict_order")
        operator = self._operator(layout.number_type)
        statement = sql.SQL(
            "SELECT id, vector {0} %(query)b FROM {1} ORDER BY vector {0} %(query)b LIMIT %(k)s"
        ).format(sql.SQL(operator), self._db.name(table))
        results: list[tuple[list[str], np.ndarray]] = []
        with self._db.transaction(f"searching {table}") as cursor:
            for name, value in parameters.items():
                cursor.execute("SELECT set_config(%s, %s, true)", [name, str(value)])
            if exact:
                cursor.execute("SET LOCAL enable_indexscan = off")
            for query in _query_values(queries, layout):
                cursor.execute(statement, {"query": query, "k": k})
                rows = cursor.fetchall()
                distances = np.array([row[1] for row in rows], np.float64)
                results.append(
                    ([row[0] for row in rows], _similarity(distances, operator, queries.shape[1]))
                )
        return layouts.padded(results, k)

    def point(self, name: str, table: str) -> None:
        """Replace the view in one transaction; rights that were granted on it are kept."""
        with self._db.transaction(f"pointing {name} at {table}") as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = '{POINT_SECONDS}s'")
            self._check_free(name)
            try:
                with cursor.connection.transaction():
                    cursor.execute(self._view_of(name, table))
                return
            except errors.InvalidTableDefinition:
                pass  # the columns differ, so that the view cannot be replaced as it stands
            grants = self._grants(cursor, name)
            cursor.execute(sql.SQL("DROP VIEW {}").format(self._db.name(name)))
            cursor.execute(self._view_of(name, table))
            for grantee, privilege, option in grants:
                cursor.execute(
                    sql.SQL("GRANT {} ON {} TO {}{}").format(
                        sql.SQL(privilege),
                        self._db.name(name),
                        sql.SQL("PUBLIC") if grantee is None else sql.Identifier(grantee),
                        sql.SQL(" WITH GRANT OPTION" if option else ""),
                    )
                )

    def pointed(self, name: str) -> str | None:
        """Return the table that the view of this name selects from."""
        with self._db.transaction(f"reading the view {name}") as cursor:
            cursor.execute(
                "SELECT DISTINCT target.relname FROM pg_rewrite AS rule JOIN pg_depend AS uses "
                "ON uses.objid = rule.oid AND uses.classid = 'pg_rewrite'::regclass "
                "AND uses.refclassid = 'pg_class'::regclass JOIN pg_class AS target "
                "ON target.oid = uses.refobjid AND target.oid <> rule.ev_class "
                "WHERE rule.ev_class = to_regclass(%s)",
                [self._db.text(name)],
            )
            found = [row[0] for row in cursor.fetchall()]
        if len(found) == 1 and re.fullmatch(rf"{re.escape(name)}_[1-9][0-9]*", found[0]):
            return str(found[0])
        return None

    def drop(self, table: str) -> None:
        """Remove a table; refuses one that a view refers to."""
        try:
            with self._db.transaction(f"dropping {table}") as cursor:
                cursor.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self._db.name(table)))
        except InUseError:
            raise ConfigError(
                f"the table {table} at {self._db.place} is in use: the index's name or another "
                "view refers to it; point the name at another table first"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def _check_free(self, name: str) -> None:
        """Raise if the name is that of a table, or of a view of something else."""
        if self._db.kind(name) is not None and self.pointed(name) is None:
            raise ConfigError(
                f"{self._db.place} already has a table or view {self._db.schema}.{name} that is "
                "not of this index; choose another name, or another store.schema_name"
            )

    def _create(self, cursor: psycopg.Cursor[Any], table: str, layout: Layout) -> None:
        vector = f"{pgvector_columns.SQL_VECTORS[layout.number_type]}({layout.dimensions}) NOT NULL"
        fixed = {
            "id": 'text COLLATE "C" PRIMARY KEY',
            "document": "text NOT NULL",
            "chunk": "integer NOT NULL",
            "vector": vector,
        }
        parts = [
            sql.SQL("{} {}").format(
                sql.Identifier(field.name),
                sql.SQL(fixed.get(field.name) or pgvector_columns.sql_type(field.type)),
            )
            for field in layout.schema
        ]
        cursor.execute(
            sql.SQL("CREATE TABLE {} ({})").format(self._db.name(table), sql.SQL(", ").join(parts))
        )
        comment = {"made by": "rayembed", "layout": layouts.layout_values(layout)}
        cursor.execute(
            sql.SQL("COMMENT ON TABLE {} IS {}").format(self._db.name(table), json.dumps(comment))
        )

    def _layout(self, table: str) -> Layout:
        """Read a table's layout from its comment."""
        with self._db.transaction(f"reading {table}") as cursor:
            cursor.execute(
                "SELECT obj_description(to_regclass(%s), 'pg_class')", [self._db.text(table)]
            )
            [comment] = first(cursor)
        try:
            return layouts.layout_from(json.loads(comment or "")["layout"])
        except (ValueError, KeyError, TypeError, ArtifactError):
            raise ConfigError(
                f"{self._db.place} has no table {table} with the layout in its comment; "
                "build the index again under another name"
            ) from None

    def _incoming(self, cursor: psycopg.Cursor[Any], table: str) -> sql.Identifier:
        """Create a temporary table with a table's columns, which the transaction's end drops."""
        incoming = sql.Identifier("pg_temp", "rayembed_incoming")
        cursor.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {}) ON COMMIT DROP").format(
                incoming, self._db.name(table)
            )
        )
        return incoming

    def _operator(self, number_type: str) -> str:
        if number_type == "bits":
            return "<~>"
        return "<=>" if self._index_settings.get("distance") == "cosine" else "<#>"

    def _index(self, cursor: psycopg.Cursor[Any], table: str, layout: Layout) -> None:
        """Build the index that the settings describe; one of the same settings stays as it is."""
        wanted = json.dumps(self._index_settings, sort_keys=True)
        index = f"{table}_ann"
        cursor.execute(
            "SELECT obj_description(to_regclass(%s), 'pg_class')", [self._db.text(index)]
        )
        seen = first(cursor)[0]
        if seen == wanted or (seen is None and not self._index_settings):
            return
        cursor.execute(sql.SQL("DROP INDEX IF EXISTS {}").format(self._db.name(index)))
        options = dict(self._index_settings)
        if not options:
            return
        kind, distance = options.pop("kind"), options.pop("distance", "inner_product")
        short = {"inner_product": "ip", "cosine": "cosine"}[distance]
        operators = {
            "float32": f"vector_{short}_ops",
            "float16": f"halfvec_{short}_ops",
            "bits": "bit_hamming_ops",
        }[layout.number_type]
        for name in BUILD_SETTINGS:
            if name in options:
                cursor.execute("SELECT set_config(%s, %s, true)", [name, str(options.pop(name))])
        given = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(name), value)
            for name, value in options.items()
        )
        cursor.execute(
            sql.SQL("CREATE INDEX {} ON {} USING {} (vector {}){}").format(
                sql.Identifier(index),
                self._db.name(table),
                sql.Identifier(kind),
                sql.SQL(operators),
                sql.SQL(" WITH ({})").format(given) if options else sql.SQL(""),
            )
        )
        cursor.execute(sql.SQL("COMMENT ON INDEX {} IS {}").format(self._db.name(index), wanted))

    def _view_of(self, name: str, table: str) -> sql.Composed:
        return sql.SQL("CREATE OR REPLACE VIEW {} AS SELECT * FROM {}").format(
            self._db.name(name), self._db.name(table)
        )

    def _grants(self, cursor: psycopg.Cursor[Any], view: str) -> list[tuple[str | None, str, bool]]:
        """Return the rights that others than its owner have on a view; None stands for PUBLIC."""
        cursor.execute(
            "SELECT CASE WHEN grantee = 0 THEN NULL ELSE pg_get_userbyid(grantee)::text END, "
            "privilege_type, is_grantable FROM pg_class, aclexplode(relacl) "
            "WHERE pg_class.oid = to_regclass(%s) AND grantee <> relowner",
            [self._db.text(view)],
        )
        return [(row[0], row[1], row[2]) for row in cursor.fetchall()]


def _query_values(queries: np.ndarray, layout: Layout) -> list[pgvector_columns.Wire]:
    values = to_bits(queries) if layout.number_type == "bits" else queries
    return pgvector_columns.to_wire(values, layout.dimensions, layout.number_type)


def _similarity(distances: np.ndarray, operator: str, dimensions: int) -> np.ndarray:
    """Convert distances to similarities."""
    match operator:
        case "<#>":
            return -distances
        case "<=>":
            return 1 - distances
        case _:
            return 1 - 2 * distances / dimensions

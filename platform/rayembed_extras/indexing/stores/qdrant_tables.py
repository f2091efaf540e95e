"""Client of the vector store `qdrant`: a collection for each table, an alias for the name of an
index.

Qdrant's ids are numbers or UUIDs, so a point has the UUID that follows from the row's id; the id
itself and all other columns are its payload, and null is a key that is not there. The collection's
metadata hold the layout.
"""

import contextlib
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import httpx
import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from qdrant_client import QdrantClient, models

from rayembed.errors import ArtifactError, ConfigError, StorageError
from rayembed_extras.indexing.store import VECTOR, Layout, SearchResults
from rayembed_extras.indexing.stores import layouts
from rayembed_extras.indexing.stores.json_values import as_json, from_json
from rayembed_extras.indexing.stores.qdrant import QdrantStore
from rayembed_extras.indexing.stores.qdrant_errors import translated

IDS = uuid.UUID("6f2c1c0e-8a53-5d0c-9d5e-0c1f4a3b7e21")
"""Namespace of the points' UUIDs."""
OLDEST_SERVER = (1, 16)
"""First version with metadata of a collection."""
LAYOUT = "rayembed"
"""Key of a collection's metadata for its layout."""
MAX_DIMENSIONS = 65_536
NAME_BYTES = 255
BYTES_PER_REQUEST = 8 << 20
"""A server takes requests of 32 MiB; a number of JSON has up to twelve bytes."""
POINTS_PER_REQUEST = 1_000
QUERIES_PER_REQUEST = 64
POLL_SECONDS = 0.5


class QdrantTables:
    """A connection to Qdrant."""

    has_parallel_writers: ClassVar[bool] = False

    def __init__(self, settings: QdrantStore) -> None:
        self._settings = settings
        self._place = f"Qdrant at {settings.to}"
        with self._translated("opening"):
            self._client = self._open()

    def _open(self) -> QdrantClient:
        raise NotImplementedError

    def _create_payload_indexes(self, table: str) -> None:
        """Create the payload indexes of the settings."""

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless Qdrant accepts such collections under this name."""
        if len(name.encode()) > NAME_BYTES - 5:
            raise ConfigError(
                f"name has {len(name.encode())} bytes; Qdrant's names have {NAME_BYTES}, which "
                f"with the tables' numbers allows {NAME_BYTES - 5}"
            )
        if layout.dimensions > MAX_DIMENSIONS:
            raise ConfigError(
                f"{layout.dimensions:,} dimensions: Qdrant stores {MAX_DIMENSIONS:,} at most; set "
                "model.dimensions if the model was trained for fewer"
            )
        self._options(layout)
        columns = {field.name for field in layout.schema} - {VECTOR}
        if unknown := sorted(set(self._payload_schemas()) - columns):
            raise ConfigError(
                f"store.payload_indexes.{unknown[0]}: the rows have no such column; they have "
                f"{', '.join(sorted(columns))}"
            )
        if name in self._collections():
            raise ConfigError(
                f"{self._place} already has a collection {name}, so that no alias can have this "
                "name; choose another one"
            )

    def tables(self, name: str) -> list[str]:
        """List the tables of an index."""
        matches = [
            re.fullmatch(rf"{re.escape(name)}_([1-9][0-9]*)", table)
            for table in self._collections()
        ]
        return [match[0] for match in sorted(filter(None, matches), key=lambda m: int(m[1]))]

    def create(self, table: str, layout: Layout) -> None:
        """Create an empty collection; does nothing if it exists with the same columns."""
        if table not in self._collections():
            options = self._options(layout)
            with self._translated(f"creating {table}"):
                self._client.create_collection(
                    table, **options, metadata={LAYOUT: layouts.layout_values(layout)}
                )
        layouts.check_layout(table, self._layout(table), layout)
        self._create_payload_indexes(table)

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows, replacing the rows of the same ids, in requests of bounded size; the call is
        not one step, but may be repeated.
        """
        if not len(rows):
            return
        rows = layouts.checked_rows(table, rows, self._layout(table))
        other = rows.drop_columns([VECTOR])
        per_row = 12 * rows[VECTOR].type.list_size + other.nbytes // len(rows)
        size = max(1, min(POINTS_PER_REQUEST, BYTES_PER_REQUEST // per_row))
        for start in range(0, len(rows), size):
            points = _points(rows.slice(start, size))
            with self._translated(f"writing into {table}"):
                self._client.upsert(table, points, wait=True)

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Delete the points of these ids."""
        for start in range(0, len(ids), POINTS_PER_REQUEST):
            some = models.PointIdsList(
                points=[_point_id(name) for name in ids[start : start + POINTS_PER_REQUEST]]
            )
            with self._translated(f"deleting from {table}"):
                self._client.delete(table, some, wait=True)

    def finish(self, table: str, layout: Layout) -> None:
        """Create the payload indexes, and wait until Qdrant has built its indexes."""
        self._create_payload_indexes(table)

    def count(self, table: str) -> int:
        """Count the points of a collection."""
        with self._translated(f"counting {table}"):
            return int(self._client.count(table, exact=True).count)

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in batches."""
        layout = self._layout(table)
        names = list(layout.schema.names if columns is None else columns)
        schema = pa.schema([layout.schema.field(name) for name in names])
        per_row = 12 * layout.dimensions if VECTOR in names else 1_000
        size = max(1, min(POINTS_PER_REQUEST, BYTES_PER_REQUEST // per_row))
        offset = None
        while True:
            with self._translated(f"reading {table}"):
                points, offset = self._client.scroll(
                    table,
                    limit=size,
                    offset=offset,
                    with_payload=[name for name in names if name != VECTOR] or False,
                    with_vectors=VECTOR in names,
                )
            if points:
                yield _rows(points, schema)
            if offset is None:
                return

    def fetch(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of these ids."""
        schema = pa.schema([self._layout(table).schema.field(name) for name in columns])
        with self._translated(f"reading {table}"):
            named = [_point_id(name) for name in ids]
            points = self._client.retrieve(table, named, with_vectors=VECTOR in columns)
        return _rows(points, schema)

    def search(
        self, table: str, queries: np.ndarray, k: int, options: Mapping[str, Any] | None = None
    ) -> SearchResults:
        """Find the k nearest points; `options`: Qdrant's `SearchParams`, such as `hnsw_ef`."""
        layout = self._layout(table)
        queries = layouts.checked_queries(table, queries, layout.dimensions)
        try:
            parameters = models.SearchParams(**(options or {}))
        except ValidationError as error:
            raise ConfigError(f"options of a search by Qdrant: {_first(error)}") from None
        results: list[tuple[list[str], np.ndarray]] = []
        for start in range(0, len(queries), QUERIES_PER_REQUEST):
            requests = [
                models.QueryRequest(query=query, limit=k, params=parameters, with_payload=["id"])
                for query in queries[start : start + QUERIES_PER_REQUEST].tolist()
            ]
            with self._translated(f"searching {table}"):
                answers = self._client.query_batch_points(table, requests)
            for answer in answers:
                ids = [str((point.payload or {})["id"]) for point in answer.points]
                scores = np.array([point.score for point in answer.points], np.float32)
                results.append((ids, scores))
        return layouts.padded(results, k)

    def point(self, name: str, table: str) -> None:
        """Switch the alias in one request."""
        if name in self._collections():
            raise ConfigError(
                f"{self._place} has a collection {name}, so that no alias can have this name"
            )
        if table not in self._collections():
            raise ConfigError(f"{self._place} has no collection {table}")
        create = models.CreateAliasOperation(
            create_alias=models.CreateAlias(collection_name=table, alias_name=name)
        )
        operations: list[models.CreateAliasOperation | models.DeleteAliasOperation] = [create]
        if self.pointed(name) is not None:
            operations.insert(
                0, models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=name))
            )
        with self._translated(f"pointing {name} at {table}"):
            self._client.update_collection_aliases(operations)

    def pointed(self, name: str) -> str | None:
        """Return the collection of this alias."""
        return self._aliases().get(name)

    def drop(self, table: str) -> None:
        """Remove a collection; refuses one that an alias refers to."""
        aliases = [name for name, of_alias in self._aliases().items() if of_alias == table]
        if aliases:
            raise ConfigError(
                f"the alias {aliases[0]} of {self._place} refers to the collection {table}; point "
                "it at another one before this one is dropped"
            )
        if table in self._collections():
            with self._translated(f"dropping {table}"):
                self._client.delete_collection(table)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _collections(self) -> set[str]:
        with self._translated("listing collections"):
            return {item.name for item in self._client.get_collections().collections}

    def _aliases(self) -> dict[str, str]:
        with self._translated("listing aliases"):
            aliases = self._client.get_aliases().aliases
        return {item.alias_name: item.collection_name for item in aliases}

    def _layout(self, table: str) -> Layout:
        """Read a table's layout from its collection's metadata."""
        if table not in self._collections():
            raise ConfigError(f"{self._place} has no collection {table}")
        with self._translated(f"reading {table}"):
            metadata = self._client.get_collection(table).config.metadata
        try:
            return layouts.layout_from((metadata or {})[LAYOUT])
        except (KeyError, ArtifactError):
            raise ConfigError(
                f"the collection {table} of {self._place} has no layout of this platform in its "
                "metadata; build the index again under another name"
            ) from None

    def _options(self, layout: Layout) -> dict[str, Any]:
        """Options of a new collection, checked by the client's own types."""
        given = dict(self._settings.index)
        vectors = {
            "size": layout.dimensions,
            "distance": models.Distance.DOT,
            "datatype": layout.number_type,
            "on_disk": given.pop("on_disk", None),
        }
        try:
            options = models.CreateCollection(vectors=models.VectorParams(**vectors), **given)
        except (ValidationError, TypeError) as error:
            raise ConfigError(f"store.index is not accepted by Qdrant: {_first(error)}") from None
        values = {name: getattr(options, name) for name in given}
        return {"vectors_config": options.vectors, **values}

    def _payload_schemas(self) -> dict[str, Any]:
        schemas = {}
        for column, kind in self._settings.payload_indexes.items():
            try:
                adapter = TypeAdapter(models.PayloadFieldSchema)
                schemas[column] = adapter.validate_python(kind)
            except ValidationError as error:
                raise ConfigError(
                    f"store.payload_indexes.{column} is not accepted by Qdrant: {_first(error)}"
                ) from None
        return schemas

    def _translated(self, what: str) -> contextlib.AbstractContextManager[None]:
        return translated(what, self._place, self._settings)


class QdrantFolder(QdrantTables):
    """A folder of the client's local mode, of one process."""

    def _open(self) -> QdrantClient:
        # The thread that writes need not be the one that opened it.
        return QdrantClient(path=self._settings.to, force_disable_check_same_thread=True)

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows, replacing the rows of the same ids, and flush them to the disk."""
        with self._flushed(table):
            super().upsert(table, rows)

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Delete the points of these ids, and flush that to the disk."""
        with self._flushed(table):
            super().delete(table, ids)

    @contextlib.contextmanager
    def _flushed(self, table: str) -> Iterator[None]:
        """Let SQLite keep a write-ahead log inside the block: the client commits each point by
        itself, which waited 10 ms for the disk each time. At the end the log moves into the file,
        because a crash of the machine may lose it.
        """
        file = self._file(table)
        if file is None:
            yield
            return
        with self._translated(f"writing into {table}"):
            file.execute("PRAGMA journal_mode = WAL").fetchall()
            file.execute("PRAGMA synchronous = NORMAL")
            yield
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _file(self, table: str) -> sqlite3.Connection | None:
        """SQLite file of a collection; None: this version of the client keeps it elsewhere."""
        collections = getattr(getattr(self._client, "_client", None), "collections", {})
        storage = getattr(getattr(collections.get(table), "storage", None), "storage", None)
        return storage if isinstance(storage, sqlite3.Connection) else None


class QdrantServer(QdrantTables):
    """A connection to a server."""

    has_parallel_writers: ClassVar[bool] = True

    def _open(self) -> QdrantClient:
        settings = self._settings
        address = httpx.URL(settings.to)
        return QdrantClient(
            url=settings.to,
            # Without a port, https:// has 443, as behind a proxy, and http:// Qdrant's own.
            port=address.port or (443 if address.scheme == "https" else 6333),
            api_key=settings.secret(),
            prefer_grpc=settings.prefer_grpc,
            timeout=settings.timeout_seconds,
            check_compatibility=False,
        )

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless the server accepts such collections, and lets this key write."""
        with self._translated("the connection"):
            version = self._client.info().version
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < OLDEST_SERVER:
            raise ConfigError(
                f"{self._place} has version {version}; {'.'.join(map(str, OLDEST_SERVER))} or "
                "later is needed"
            )
        super().check(layout, name)
        # Asks for the right to write, and changes nothing: there is no such collection.
        with self._translated("a trial of the right to write"):
            self._client.delete_collection(f"{name}_trial_{uuid.uuid4().hex}"[:NAME_BYTES])

    def finish(self, table: str, layout: Layout) -> None:
        """Set the options of the settings, and wait until Qdrant has built its indexes."""
        super().finish(table, layout)
        options = self._options(layout)
        changeable = ("hnsw_config", "optimizers_config", "quantization_config")
        values = {name: options[name] for name in changeable if options.get(name) is not None}
        if values:
            with self._translated(f"changing the options of {table}"):
                self._client.update_collection(table, **values)
        while True:
            with self._translated(f"reading {table}"):
                status = self._client.get_collection(table).status
            if status == models.CollectionStatus.RED:
                raise StorageError(f"{self._place}: the optimiser of {table} failed; see its log")
            if status != models.CollectionStatus.YELLOW:
                return
            time.sleep(POLL_SECONDS)

    def _create_payload_indexes(self, table: str) -> None:
        for column, schema in self._payload_schemas().items():
            with self._translated(f"creating the payload index of {column}"):
                self._client.create_payload_index(table, column, schema, wait=True)


def _point_id(name: str) -> str:
    return str(uuid.uuid5(IDS, name))


def _points(rows: pa.Table) -> models.Batch:
    names = [name for name in rows.schema.names if name != VECTOR]
    columns = [as_json(rows[name]) for name in names]
    payloads = [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in zip(*columns, strict=True)
    ]
    flat = np.asarray(rows[VECTOR].combine_chunks().flatten(), np.float32)
    return models.Batch(
        ids=[_point_id(name) for name in rows["id"].to_pylist()],
        vectors=flat.reshape(len(rows), -1).tolist(),
        payloads=payloads,
    )


def _rows(points: Sequence[models.Record], schema: pa.Schema) -> pa.Table:
    arrays = []
    for field in schema:
        if field.name == VECTOR:
            vectors = np.array([point.vector for point in points], np.float32)
            items = pa.array(vectors.reshape(-1)).cast(field.type.value_type)
            arrays.append(pa.FixedSizeListArray.from_arrays(items, type=field.type))
        else:
            values = [(point.payload or {}).get(field.name) for point in points]
            arrays.append(from_json(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"

"""Vector store `lance`: a LanceDB table in a folder or bucket, written and searched in process.

A table is `<to>/<table>.lance`, which `lancedb.connect(to).open_table(table)` opens. On a local
disk the name of an index is also a symbolic link to its current table, so that
`open_table(name)` works.

Each call is one commit of Lance: readers see all of it or nothing. Calls of several processes at
once are repeated by Lance until they fit together.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayembed.assets.atomic import full, is_full
from rayembed.assets.clients import split_options
from rayembed.assets.storage import exists, is_remote, join, open_storage
from rayembed.config.types import Reference
from rayembed.errors import (
    ArtifactError,
    ConfigError,
    RayembedError,
    StorageError,
    require_packages,
)
from rayembed.machine.quantisation import to_bits
from rayembed_extras.indexing.settings import NumberType, StoreSettings
from rayembed_extras.indexing.store import VECTOR, Layout, SearchResults
from rayembed_extras.indexing.stores.layouts import (
    check_layout,
    checked_queries,
    checked_rows,
    layout_from,
    layout_values,
    padded,
)
from rayembed_extras.indexing.stores.table_folder import TableFolder, index_of

logger = logging.getLogger(__name__)

_LAYOUT = b"rayembed.layout"
"""Entry of a table's schema with its layout."""

_KEY = {b"lance-schema:unenforced-primary-key": b"true"}
"""Mark of the column by which Lance sees that two processes insert the same id at once. Without it
both rows stay."""

_IDS_AT_ONCE = 10_000
"""Ids of one statement that deletes rows."""

_ROWS_AT_ONCE = 8192
"""Largest number of rows of a batch that `scan` yields."""

_RETRIES = 100
"""Attempts of a commit while other processes commit to the same table."""

_PATIENCE = timedelta(minutes=10)
"""Time after which a commit is given up while other processes commit to the same table."""


class LanceStore(StoreSettings):
    """Settings of the store `lance`: LanceDB tables, embedded in the process."""

    kind: Literal["lance"] = "lance"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "bits")
    packages: ClassVar[tuple[str, ...]] = ("lance", "lancedb")
    changeable: ClassVar[frozenset[str]] = frozenset({"index", "keep_versions_days"})
    to: Reference | None = None
    """Folder, or `s3://…`, `gs://…`, of the tables; credentials come from the environment. None:
    where `rayembed index` puts them, below `placement.storage_path`."""
    keep_versions_days: float = Field(default=7.0, ge=0.0)
    """Days for which former versions of the current table are kept, so that a process that opened
    it before an update can still read it. Those of a table that no name refers to are removed at
    once."""

    def open(self) -> "LanceTables":
        """Open the folder of tables."""
        require_packages("the store lance", "indexes", *self.packages)
        return LanceTables(self)


class LanceTables:
    """LanceDB tables in a folder or bucket, a `store.VectorStore`."""

    has_parallel_writers: ClassVar[bool] = True

    def __init__(self, settings: LanceStore) -> None:
        """Open the folder of tables; nothing is read or written."""
        self._settings = settings
        self._folder = TableFolder(settings.to, ".lance")
        self._layouts: dict[str, Layout] = {}

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless tables can be written there and the index settings fit the number type."""
        index = self._settings.index
        kind = index.get("index_type", "")
        if layout.number_type == "bits" and index and kind != "IVF_FLAT":
            raise ConfigError(
                f"store.index: LanceDB indexes number_type bits by IVF_FLAT only, not {kind!r}; "
                "give index_type: IVF_FLAT, or nothing for exact search"
            )
        if index and not kind:
            raise ConfigError(
                "store.index has no index_type, such as IVF_HNSW_SQ, IVF_PQ or IVF_FLAT"
            )
        if reserved := {"column", "replace", "metric", "storage_options"} & index.keys():
            raise ConfigError(
                f"store.index: {', '.join(sorted(reserved))} is decided by the platform; leave it "
                "out"
            )
        self._folder.check()
        if not is_remote(self._folder.to):
            link = Path(open_storage(join(self._folder.to, f"{name}.lance"))[1])
            if link.exists() and not link.is_symlink():
                raise ConfigError(
                    f"{str(link)!r} is a table that another program made; give the index another "
                    "name or the store another folder"
                )

    def tables(self, name: str) -> list[str]:
        """List the tables of an index in the order of their numbers."""
        return self._folder.tables(name)

    def create(self, table: str, layout: Layout) -> None:
        """Create an empty table; does nothing if it exists with the same columns."""
        import lance

        if self._exists(table):
            check_layout(table, self._layout(table), layout)
            return
        note = {_LAYOUT: json.dumps(layout_values(layout)).encode()}
        schema = layout.schema.with_metadata(note)
        place = schema.get_field_index("id")
        schema = schema.set(place, schema.field(place).with_metadata(_KEY))
        empty = schema.empty_table()
        with self._answers(table):
            lance.write_dataset(empty, self._uri(table), storage_options=self._options())

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows in one commit, replacing rows with the same ids."""
        rows = checked_rows(table, rows, self._layout(table))
        if not rows.num_rows:
            return
        with self._answers(table):
            merge = self._open(table).merge_insert("id")
            merge = merge.when_matched_update_all().when_not_matched_insert_all()
            merge.conflict_retries(_RETRIES).retry_timeout(_PATIENCE).execute(rows)

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Delete the rows of these ids; ids that are not there are ignored."""
        with self._answers(table):
            opened = self._open(table)
            for first in range(0, len(ids), _IDS_AT_ONCE):
                some = (_quoted(name) for name in ids[first : first + _IDS_AT_ONCE])
                opened.delete(
                    f"id IN ({', '.join(some)})", conflict_retries=_RETRIES, retry_timeout=_PATIENCE
                )

    def finish(self, table: str, layout: Layout) -> None:
        """Join small files, build or update the index, and remove versions that nobody reads."""
        check_layout(table, self._layout(table), layout)
        with self._answers(table):
            opened = self._open(table)
            opened.optimize.compact_files()
            self._index(table, opened, layout)
            read = self._folder.pointed(index_of(table)) == table
            if read:
                older = timedelta(days=self._settings.keep_versions_days)
                opened.cleanup_old_versions(older)
            else:
                # Nobody else writes: the job on an index holds its lease.
                opened.cleanup_old_versions(timedelta(0), delete_unverified=True)

    def count(self, table: str) -> int:
        """Count the rows of a table."""
        with self._answers(table):
            return int(self._open(table).count_rows())

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows of one version in batches."""
        schema = self._layout(table).schema
        names = schema.names if columns is None else list(columns)
        wanted = pa.schema([schema.field(name) for name in names])
        with self._answers(table):
            batches = self._open(table).to_batches(columns=names, batch_size=_ROWS_AT_ONCE)
            for batch in batches:
                yield pa.Table.from_batches([batch]).select(names).cast(wanted)

    def fetch(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of these ids."""
        schema = self._layout(table).schema
        wanted = pa.schema([schema.field(name) for name in columns])
        found = [wanted.empty_table()]
        with self._answers(table):
            opened = self._open(table)
            for first in range(0, len(ids), _IDS_AT_ONCE):
                some = ", ".join(_quoted(name) for name in ids[first : first + _IDS_AT_ONCE])
                rows = opened.to_table(columns=list(columns), filter=f"id IN ({some})")
                found.append(rows.select(list(columns)).cast(wanted))
        return pa.concat_tables(found)

    def word_search(self, table: str) -> Callable[[str, int], list[str]] | None:
        """Return the search for words by a full-text index over the texts, as
        `table.create_index("text", config=FTS())` of LanceDB makes it; None: the table has none.

        The function takes a query and k, and returns the ids of at most k rows, best first.
        """
        with self._answers(table):
            indices = self._open(table).describe_indices()
        if not any("text" in index.field_names for index in indices):
            return None

        def search(query: str, k: int) -> list[str]:
            from lance.query import MatchQuery

            with self._answers(table):
                scanner = self._open(table).scanner(
                    columns=["id", "_score"],
                    full_text_query=MatchQuery(query, "text"),
                    limit=k,
                    disable_scoring_autoprojection=True,
                )
                rows = scanner.to_table()
            ids, scores = rows["id"].to_pylist(), rows["_score"].to_pylist()
            ranked = sorted(zip(ids, scores, strict=True), key=lambda row: (-row[1], row[0]))
            return [name for name, _ in ranked]

        return search

    def search(
        self, table: str, queries: np.ndarray, k: int, options: Mapping[str, Any] | None = None
    ) -> SearchResults:
        """Find the k nearest rows by cosine, or for bits by equal signs, through Lance's index.

        Args:
            options: of Lance's search: `nprobes`, `refine_factor`, `ef`, `use_index`, ….
        """
        layout = self._layout(table)
        queries = checked_queries(table, queries, layout.dimensions)
        bits = layout.number_type == "bits"
        asked = to_bits(queries) if bits else queries
        if layout.number_type == "float16":
            asked = queries.astype(np.float16)
        found: list[tuple[Sequence[str], np.ndarray]] = []
        with self._answers(table):
            opened = self._open(table)
            for query in asked:
                nearest = {
                    "metric": _metric(layout),
                    **(options or {}),
                    "column": VECTOR,
                    "q": pa.array(query),
                    "k": k,
                }
                try:
                    scanner = opened.scanner(
                        columns=["id", "_distance"],
                        nearest=nearest,
                        disable_scoring_autoprojection=True,
                    )
                except TypeError as error:
                    problem = f"Lance's search has not all of {', '.join(options or {})}: {error}"
                    raise ConfigError(problem) from error
                rows = scanner.to_table()
                distances = rows["_distance"].to_numpy()
                scores = 1 - (2 / layout.dimensions if bits else 1) * distances
                found.append((rows["id"].to_pylist(), scores))
        return padded(found, k)

    def point(self, name: str, table: str) -> None:
        """Let the name refer to this table: in `<name>.json`, and locally by a symbolic link."""
        if index_of(table) != name or not self._exists(table):
            raise ConfigError(f"the index {name} has no table {table!r} in {self._folder.to!r}")
        self._folder.point(name, table)
        if is_remote(self._folder.to):
            return
        link = Path(open_storage(join(self._folder.to, f"{name}.lance"))[1])
        beside = link.with_name(f".{link.name}.{os.getpid()}.tmp")
        try:
            beside.unlink(missing_ok=True)
            beside.symlink_to(f"{table}.lance")
            beside.replace(link)
        except OSError as error:  # a disk without links: the file alone says it
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            logger.warning("cannot make the link %s: %s; open the table %s", link, error, table)

    def pointed(self, name: str) -> str | None:
        """Return the table that the name refers to."""
        return self._folder.pointed(name)

    def drop(self, table: str) -> None:
        """Remove a table's folder."""
        self._layouts.pop(table, None)
        self._folder.drop(table)

    def bytes_of(self, table: str) -> int:
        """Sum the bytes of a table's files, with its index and former versions."""
        return self._folder.bytes_of(table)

    def close(self) -> None:
        """Do nothing: no connection is held."""

    def _index(self, table: str, opened: Any, layout: Layout) -> None:
        """Build the index by the settings, or take up new rows where it has been built by them."""
        settings = dict(self._settings.index)
        built = [index for index in opened.describe_indices() if VECTOR in index.field_names]
        if not settings:
            for index in built:
                opened.drop_index(index.name)
            return
        note = json.dumps(settings, sort_keys=True)
        same = opened.config().get("rayembed.index") == note
        if built and same:
            opened.optimize.optimize_indices()
            return
        if not opened.count_rows():
            return
        kind = settings.pop("index_type")
        try:
            opened.create_index(
                VECTOR, kind, metric=_metric(layout), replace=True, name="vector_idx", **settings
            )
        except (ValueError, TypeError, KeyError, NotImplementedError) as error:
            raise ConfigError(
                f"store.index: LanceDB cannot build {kind} over the table {table}: {_first(error)}"
            ) from error
        opened.update_config({"rayembed.index": note})

    def _exists(self, table: str) -> bool:
        return exists(join(self._folder.path(table), "_versions"))

    def _open(self, table: str) -> Any:
        import lance

        return lance.dataset(self._uri(table), storage_options=self._options())

    def _layout(self, table: str) -> Layout:
        if table not in self._layouts:
            if not self._exists(table):
                raise ArtifactError(f"there is no table {table!r} in {self._folder.to!r}")
            with self._answers(table):
                note = (self._open(table).schema.metadata or {}).get(_LAYOUT)
            if note is None:
                raise ArtifactError(
                    f"{self._folder.path(table)!r} is a table that another program made"
                )
            self._layouts[table] = layout_from(json.loads(note))
        return self._layouts[table]

    def _uri(self, table: str) -> str:
        path = self._folder.path(table)
        return split_options(path)[0] if is_remote(path) else open_storage(path)[1]

    def _options(self) -> dict[str, str] | None:
        """Options of Lance's storage client: those of the address, by which pyarrow goes, too."""
        if not is_remote(self._folder.to):
            return None
        given = dict(parse_qsl(split_options(self._folder.to)[1].removeprefix("?")))
        endpoint = given.get("endpoint_override") or ""
        if endpoint and "://" not in endpoint:
            endpoint = f"{given.get('scheme', 'https')}://{endpoint}"
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3", "")
        options = {"region": given.get("region", ""), "aws_endpoint": endpoint}
        if (endpoint or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
            options["allow_http"] = "true"
        return {name: value for name, value in options.items() if value} or None

    @contextmanager
    def _answers(self, table: str) -> Iterator[None]:
        """Convert Lance's errors to a store's errors."""
        path = self._folder.path(table)
        try:
            yield
        except RayembedError:
            raise
        except (OSError, RuntimeError, ValueError, pa.ArrowException) as error:
            if is_full(error):
                raise full(path, error) from error
            if "was not found" in str(error):
                raise ArtifactError(
                    f"there is no table {table!r} in {self._folder.to!r}"
                ) from error
            raise StorageError(f"LanceDB fails at {path!r}: {_first(error)}") from error


def _metric(layout: Layout) -> str:
    # Cosine, not the inner product: k-means of the index then divides unit vectors evenly.
    return "hamming" if layout.number_type == "bits" else "cosine"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first(error: BaseException) -> str:
    """Message of one of Lance's errors without the place in its source."""
    return str(error).partition(", /")[0]

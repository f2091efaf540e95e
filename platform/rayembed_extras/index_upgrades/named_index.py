"""An index opened by its name for the queries of one model, which may need an adapter."""

import logging
import threading
import time
from typing import Any

from rayembed.errors import RayembedError, StorageError
from rayembed.registry.indexes import Hit, IndexFunctions, IndexSearch, IndexSpace
from rayembed_extras.index_upgrades.maps import QueryMap
from rayembed_extras.index_upgrades.switch import adapter_for, known_index, open_store
from rayembed_extras.indexing.manifest import Manifest
from rayembed_extras.indexing.store import VectorStore
from rayembed_extras.indexing.table_search import TableSearch

logger = logging.getLogger(__name__)

FUNCTIONS = IndexFunctions(
    open="rayembed_extras.index_upgrades.named_index:open_named_index",
    ready="rayembed_extras.index_upgrades.readiness:index_ready",
)

REFRESH_SECONDS = 5.0
"""Seconds for which a record counts as read: a server follows a switch of the index's name after
this time.
"""


class _Read:
    """A record as it was read, and what follows from it for the model."""

    def __init__(self, manifest: Manifest, space: IndexSpace | RayembedError) -> None:
        self.manifest, self.space = manifest, space
        self.when = time.monotonic()


class OpenedIndex:
    """An index opened for one model, a `rayembed.registry.indexes.NamedIndex`."""

    def __init__(self, storage: str, name: str, weights: str, bm25_rows: int) -> None:
        """Read the record of an index.

        Args:
            weights: fingerprint of the model's weights and tokenizer.

        Raises:
            ConfigError: there is no such index.
            ArtifactError: its record is damaged, or no table is complete.
        """
        self._storage, self.name, self._weights = storage, name, weights
        self._bm25_rows = bm25_rows
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._maps: dict[str, QueryMap | None] = {}
        self._searches: dict[tuple[str, str], TableSearch] = {}
        self._store: VectorStore | None = None
        self._opened_by: dict[str, Any] = {}
        self._read = self._fresh()

    def space(self) -> IndexSpace:
        """Return the current table's space, as the record had it at most `REFRESH_SECONDS` ago.

        Raises:
            ConfigError: another model made the table, and there is no adapter for this one.
            ArtifactError: the record cannot be read.
        """
        with self._lock:
            if time.monotonic() - self._read.when > REFRESH_SECONDS:
                try:
                    self._read = self._fresh()
                except StorageError as error:  # the storage may answer again
                    self._read.when = time.monotonic()
                    logger.warning("the record of %s cannot be read now: %s", self.name, error)
            found = self._read.space
        if isinstance(found, RayembedError):
            raise type(found)(*found.args)  # of a new traceback
        return found

    def _fresh(self) -> _Read:
        manifest = known_index(self._storage, self.name)
        try:
            return _Read(manifest, self._space_of(manifest))
        except StorageError:
            raise
        except RayembedError as error:
            return _Read(manifest, error)

    def _space_of(self, manifest: Manifest) -> IndexSpace:
        table = str(manifest.current)
        record = manifest.tables[table]
        made, entry = record.made_by, (record.adapter or {}).get(self._weights)
        key = f"{table} {made.weights} {entry}"
        if key not in self._maps:
            self._maps = {key: adapter_for(self._storage, self.name, self._weights)}
        adapter = self._maps[key]
        query_instruction = made.query_instruction
        if adapter is not None and entry is not None:
            query_instruction = entry.get("query_instruction")
        return IndexSpace(
            self.name,
            table,
            made.reference,
            made.dimensions,
            record.rows,
            made.instruction,
            query_instruction,
            adapter,
            made.dtype,
            made.number_type,
        )

    def no_hybrid(self, space: IndexSpace) -> str:
        """Reason why a table cannot be searched for words; empty if it can."""
        return self._search_of(space).no_hybrid()

    def search(self, space: IndexSpace, wanted: IndexSearch) -> list[list[Hit]]:
        """Return the k best rows of each query; see `rayembed.registry.indexes.NamedIndex`.

        Raises:
            RayembedError: the store does not answer.
        """
        try:
            return self._search_of(space).search(wanted)
        except RayembedError:
            self.reconnect()
            raise

    def reconnect(self) -> None:
        """Let the next search open the store again, also while a search waits for the store."""
        self._opening, self._searches, self._store = threading.Lock(), {}, None

    def _search_of(self, space: IndexSpace) -> TableSearch:
        """Search of the space's table, also where the index's name has moved on since."""
        with self._opening:  # a store that does not answer keeps nobody from reading the record
            manifest = self._read.manifest
            record = manifest.tables.get(space.table)
            if record is None:
                raise StorageError(
                    f"the table {space.table} of the index {self.name} was removed; try again"
                )
            key = space.table, record.updated
            found = self._searches.get(key)
            if found is None:
                if self._opened_by != manifest.store:  # settings of its index, by table
                    self._store, self._opened_by = None, manifest.store
                store = self._store or open_store(manifest)
                found = TableSearch(store, record, bm25_rows=self._bm25_rows)
                # Of former tables an index of words may be large.
                self._store, self._searches = store, {key: found}
            return found


def open_named_index(storage: str, name: str, weights: str, bm25_rows: int) -> OpenedIndex:
    """Open an index for a model; see `rayembed.registry.indexes.open_index`."""
    return OpenedIndex(storage, name, weights, bm25_rows)

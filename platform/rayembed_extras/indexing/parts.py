"""Tasks on the parts of an index: compare a part with its ledger, embed it, write it to the store.

working/<fingerprint>/vectors/000012.parquet    rows that are written next, with vectors
                      done/000012.json          result of a part that store and ledger have
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.json_files import write_json
from rayembed.assets.storage import exists, join, remove_file, write_atomic
from rayembed.config.settings import parse
from rayembed.data.engine.exchange import Buckets
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.work_items import Result
from rayembed.errors import DataError
from rayembed_extras.indexing.embed import IndexModelSpec, ModelCheck, check_model, load
from rayembed_extras.indexing.layout import stored_vectors
from rayembed_extras.indexing.ledger import (
    LedgerDifference,
    compare,
    ledger_of,
    marked,
    read_ledger,
    repeated,
    without_repetitions,
    write_ledger,
)
from rayembed_extras.indexing.rows import rows_schema
from rayembed_extras.indexing.settings import STORES, StoreSettings
from rayembed_extras.indexing.store import VECTOR, Layout, VectorStore

_ROWS_PER_WRITE = 16_384
"""Most rows of a call of `VectorStore.upsert`, and ids of a call of `VectorStore.delete`."""


@dataclass(frozen=True)
class IndexPart:
    """Work item: one part of an index."""

    number: int

    @property
    def key(self) -> str:
        """Number of the part, in six digits."""
        return f"{self.number:06d}"


@dataclass(frozen=True)
class PartFiles:
    """Rows, ledgers and working files of the parts of a table."""

    buckets: Buckets
    ledger: str
    """Folder of ledgers."""
    working: str
    """Folder of the job's own files."""
    types: tuple[tuple[str, str], ...]
    """Metadata column and the name of its type, in order."""
    has_ids: bool
    """Whether ids are the files' own, so that one that occurs twice is a mistake."""

    def rows(self, number: int) -> tuple[pa.Table, int]:
        """Read the rows of a part, and the number of documents left out as repetitions.

        Raises:
            DataError: an id occurs twice.
        """
        tables = self.buckets.read(number)
        schema = rows_schema(dict(self.types))
        rows = pa.concat_tables(tables).cast(schema) if tables else schema.empty_table()
        if self.has_ids and (twice := repeated(rows)):
            told = "; ".join(f"{name!r} in {', '.join(at[:3])}" for name, at in twice)
            raise DataError(
                f"documents.id: ids occur several times: {told}. An id names one document; "
                "correct the files, or name another column"
            )
        return without_repetitions(rows)

    def difference(self, number: int) -> tuple[pa.Table, LedgerDifference]:
        """Compare the rows of a part with its ledger; return both."""
        rows, _ = self.rows(number)
        return rows, compare(rows, read_ledger(self.ledger, number))

    def vectors_path(self, number: int) -> str:
        """Path of the rows of a part that are written next."""
        return join(self.working, "vectors", f"{number:06d}.parquet")

    def done_path(self, number: int) -> str:
        """Path of the result of a part that store and ledger have."""
        return join(self.working, "done", f"{number:06d}.json")


@dataclass(frozen=True)
class ComparePart:
    """Task: count what a job has to do for a part."""

    files: PartFiles

    def __call__(self, item: IndexPart) -> Result:
        """Return counts of documents (`new`, `changed`, `unchanged`, `deleted`, `duplicates`) and
        of rows (`rows_in`, `write`, `delete`).

        Raises:
            DataError: an id occurs twice.
        """
        rows, duplicates = self.files.rows(item.number)
        found = compare(rows, read_ledger(self.files.ledger, item.number))
        return {
            "rows_in": len(rows),
            "rows_out": len(rows),
            "rejected": {},
            "duplicates": duplicates,
            "new": found.new,
            "changed": found.changed,
            "unchanged": found.unchanged,
            "deleted": found.deleted,
            "write": len(found.write),
            "delete": len(found.delete),
        }


@dataclass(frozen=True)
class EmbedIndexPart:
    """Task: embed the new and changed rows of a part, and write them to a store that several
    processes may write to.
    """

    files: PartFiles
    model: IndexModelSpec
    layout: Layout
    table: str
    store: str | None
    """Settings of the store as JSON; None: the job's own process writes."""

    def __call__(self, item: IndexPart | ModelCheck, device: str = "cpu") -> Result:
        """Embed and write; return the numbers of embedded texts, tokens and seconds."""
        if isinstance(item, ModelCheck):
            return check_model(item, self.model, device)
        rows, found = self.files.difference(item.number)
        result = self._embed(item.number, rows, found, device)
        if self.store is not None:
            settle(self.files, opened(self.store), self.table, item.number, rows, found, result)
        return result

    def _embed(self, number: int, rows: pa.Table, found: LedgerDifference, device: str) -> Result:
        wanted = rows.take(pa.array(found.write))
        path = self.files.vectors_path(number)
        tokens = 0
        embedded = len(wanted)
        if not embedded or _has_rows(path, wanted, self.layout):
            embedded = 0
        else:
            vectors, tokens = load(self.model, device).encode(wanted["text"].to_pylist())
            made = wanted.append_column(VECTOR, stored_vectors(vectors, self.layout.number_type))
            schema = pa.schema([*self.layout.schema, _TEXT_HASH])
            made = made.select(schema.names).cast(schema)
            write_atomic(path, parquet_bytes(made, statistics=False))
        return {
            "rows_in": len(wanted),
            "rows_out": len(wanted),
            "rejected": {},
            "tokens": tokens,
            "embedded": embedded,
        }


_TEXT_HASH = pa.field("text_hash", pa.int64())


def _has_rows(path: str, wanted: pa.Table, layout: Layout) -> bool:
    """Whether a file of an earlier try has vectors of these texts under these ids."""
    if not exists(path):
        return False
    names = ["id", "text_hash"]
    there = read_sealed(path, names, remedy=remedy(path))
    return len(there) == len(wanted) and all(there[n].equals(wanted[n]) for n in names)


def settle(
    files: PartFiles,
    store: VectorStore,
    table: str,
    number: int,
    rows: pa.Table,
    found: LedgerDifference,
    result: Result,
) -> None:
    """Bring store and ledger of a part up to date, and record that it is done; may be repeated.

    Args:
        rows: of the part.
        found: their difference from the ledger, whose rows have their vectors in a file.
        result: of the part.
    """
    if not found.is_empty:
        ledger = read_ledger(files.ledger, number)
        write_ledger(files.ledger, number, marked(rows, ledger, found))
        path = files.vectors_path(number)
        made = None
        if len(found.write):
            made = read_sealed(path, remedy=remedy(path)).drop_columns([_TEXT_HASH.name])
        write_part(store, table, number, made, found.delete)
        write_ledger(files.ledger, number, ledger_of(rows))
    write_json(files.done_path(number), result)
    if exists(files.vectors_path(number)):
        remove_file(files.vectors_path(number))


def write_part(
    store: VectorStore, table: str, number: int, rows: pa.Table | None, delete: Sequence[str]
) -> None:
    """Write and delete rows of one part of a table.

    Stores with a method `write_part(table, number, rows, delete)`, such as files, keep the rows of
    a part together.

    Args:
        rows: of `Layout.schema`; None: none.
    """
    own = getattr(store, "write_part", None)
    if own is not None:
        own(table, number, rows, delete)
        return
    for start in range(0, 0 if rows is None else len(rows), _ROWS_PER_WRITE):
        store.upsert(table, rows.slice(start, _ROWS_PER_WRITE))  # type: ignore[union-attr]
    for start in range(0, len(delete), _ROWS_PER_WRITE):
        store.delete(table, list(delete[start : start + _ROWS_PER_WRITE]))


def settings_of_store(store: StoreSettings) -> str:
    """Serialise a store's settings for other processes."""
    return store.model_dump_json()


@lru_cache(maxsize=1)
def opened(settings: str) -> Any:
    """Connect to a store; a process does it once."""
    return store_from(settings).open()


def store_from(settings: str) -> StoreSettings:
    """Read a store's settings from JSON."""
    values = json.loads(settings)
    found = parse(STORES.classes()[values["kind"]], values)
    assert isinstance(found, StoreSettings)
    return found

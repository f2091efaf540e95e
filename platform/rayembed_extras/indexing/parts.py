"""Tasks on the parts of an index: compare a part with its ledger, embed it, write it to the store.

working/<fingerprint>/<number of parts>/vectors/000012.parquet    rows that are written next
                                        done/000012.json          result of a finished part
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import (
    exists,
    join,
    list_files,
    open_storage,
    remove_file,
    remove_folder,
    write_atomic,
)
from rayembed.data.engine.exchange import Buckets
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.work_items import Result
from rayembed.errors import ArtifactError, DataError
from rayembed.machine.allocator import give_back_freed_memory
from rayembed_extras.indexing.embed import IndexModelSpec, ModelCheck, check_model, load
from rayembed_extras.indexing.layout import stored_vectors
from rayembed_extras.indexing.ledger import (
    LedgerDifference,
    compare,
    doubted,
    ledger_of,
    ledger_path,
    marked,
    read_ledger,
    repeated,
    without_repetitions,
    write_ledger,
)
from rayembed_extras.indexing.places import opened
from rayembed_extras.indexing.rows import parts_of, rows_schema
from rayembed_extras.indexing.store import VECTOR, Layout, VectorStore

logger = logging.getLogger(__name__)

_ROWS_PER_WRITE = 16_384
"""Most rows of a call of `VectorStore.upsert`, and ids of a call of `VectorStore.delete`."""

_ROWS_PER_FETCH = 4_096

_TEXTS_PER_CHECK = 256
"""Embedded texts for which the process embeds one of the at most 64 texts of the model's check: all
of them after a part of 16,384."""


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
    parts: int
    """Number of parts of the rows."""
    ledgers: int
    """Number of parts of the ledgers: fewer before a grown table is divided."""

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
                f"documents.id: ids occur several times: {told} (after @ the byte at which the "
                "line begins, after # the number of the row). An id names one document; correct "
                "the files, or name another column"
            )
        return without_repetitions(rows)

    def difference(self, number: int) -> tuple[pa.Table, LedgerDifference]:
        """Compare the rows of a part with its ledger; return both."""
        rows, _ = self.rows(number)
        return rows, compare(rows, self.ledger_of(number))

    def ledger_of(self, number: int) -> pa.Table:
        """Read the ledger of a part, also out of the ledger that has not been divided yet."""
        there = exists(ledger_path(self.ledger, number))
        ledger = read_ledger(self.ledger, number if there else number % self.ledgers)
        if self.ledgers == self.parts:
            return ledger
        return ledger.filter(pa.array(parts_of(ledger["document"], self.parts) == number))

    @property
    def differences(self) -> str:
        """Folder of the results of `ComparePart`."""
        return join(self.working, "differences")

    def forget_difference(self, number: int) -> None:
        """Let the next try compare a part again, whose ledger has other rows pending now."""
        units = join(self.differences, "units")
        for name in list_files(units, recursive=False):
            if name.endswith(f".{number:06d}.json"):
                remove_file(join(units, name))

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
        of rows (`rows_in`, `write`, `embed`, `delete`).

        Raises:
            DataError: an id occurs twice.
        """
        rows, duplicates = self.files.rows(item.number)
        found = compare(rows, self.files.ledger_of(item.number))
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
            "embed": len(found.embed),
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
            store = opened(self.store)
            settle(self.files, store, self.table, item.number, rows, found, result, self.layout)
        # Arrow's pool and the C library keep freed memory otherwise, more with every part.
        pa.default_memory_pool().release_unused()
        give_back_freed_memory()
        return result

    def _embed(self, number: int, rows: pa.Table, found: LedgerDifference, device: str) -> Result:
        wanted = rows.take(pa.array(found.embed))
        path = self.files.vectors_path(number)
        tokens = 0
        # A part that is finished already was embedded by an earlier try, whose check is not known.
        embedded, checked = len(wanted), not found.is_empty
        if embedded and _has_rows(path, wanted):
            embedded, checked = 0, False
        elif embedded:
            model = load(self.model, device)
            vectors, tokens = model.encode(wanted["text"].to_pylist())
            checked = model.check(-(-embedded // _TEXTS_PER_CHECK), number)
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
            "checked": checked,
        }


_TEXT_HASH = pa.field("text_hash", pa.int64())


def _has_rows(path: str, wanted: pa.Table) -> bool:
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
    layout: Layout,
) -> None:
    """Bring store and ledger of a part up to date, and record that it is done; may be repeated.

    Args:
        rows: of the part.
        found: their difference from the ledger; the rows to embed have their vectors in a file.
        result: of the part.

    Raises:
        ArtifactError: the store lacks rows that keep their vector; the next job embeds them.
    """
    if not found.is_empty:
        ledger = read_ledger(files.ledger, number)
        write_ledger(files.ledger, number, marked(rows, ledger, found))
        path = files.vectors_path(number)
        tables = []
        if len(found.embed):
            tables.append(read_sealed(path, remedy=remedy(path)).drop_columns([_TEXT_HASH.name]))
        kept = rows.take(pa.array(np.setdiff1d(found.write, found.embed)))
        if len(kept):
            made = _with_stored_vectors(store, table, number, kept, layout)
            if len(made) < len(kept):
                files.forget_difference(number)
                again = replace(found, embed=found.write)
                write_ledger(files.ledger, number, marked(rows, ledger, again))
                raise ArtifactError(
                    f"the store lacks {len(kept) - len(made):,} rows of the table {table!r} that "
                    "the index's ledger has, so another program changed the table; start the same "
                    "command again: it embeds these rows"
                )
            tables.append(made)
        made = pa.concat_tables(tables) if tables else None
        write_part(store, table, number, made, found.delete)
        write_ledger(files.ledger, number, ledger_of(rows))
    write_json(files.done_path(number), result)
    if exists(files.vectors_path(number)):
        remove_file(files.vectors_path(number))


def _stored(
    store: VectorStore, table: str, number: int, rows: pa.Table, names: Sequence[str]
) -> pa.Table:
    """Read columns of the stored rows of a part; rows that the store lacks are left out."""
    if hasattr(store, "write_part"):
        made: pa.Table = store.read_part(table, number, names)  # type: ignore[attr-defined]
        return made
    ids = rows["id"].to_pylist()
    starts = range(0, max(len(ids), 1), _ROWS_PER_FETCH)
    tables = [store.fetch(table, ids[at : at + _ROWS_PER_FETCH], names) for at in starts]
    return pa.concat_tables(tables).combine_chunks()


def _with_stored_vectors(
    store: VectorStore, table: str, number: int, rows: pa.Table, layout: Layout
) -> pa.Table:
    """Add stored vectors to rows of a part; rows that the store lacks are left out."""
    vectors = _stored(store, table, number, rows, ["id", VECTOR])
    place = pc.index_in(rows["id"].combine_chunks(), value_set=vectors["id"].combine_chunks())
    there = rows.filter(pc.is_valid(place))
    made = there.append_column(VECTOR, vectors[VECTOR].take(place.drop_null()))
    return made.select(layout.schema.names).cast(layout.schema)


def parts_to_write(
    files: PartFiles, compared: Sequence[Result]
) -> tuple[list[IndexPart], list[IndexPart]]:
    """List the parts that a job writes, and which of them an earlier try has finished.

    Args:
        compared: differences of all parts.
    """
    done = set(list_files(join(files.working, "done"), recursive=False))
    work = [IndexPart(n) for n, one in enumerate(compared) if one["write"] or one["delete"]]
    return work, [part for part in work if f"{part.key}.json" in done]


def doubt_parts(files: PartFiles, parts: Sequence[IndexPart]) -> None:
    """Let the next job embed again what a process wrote whose model was not checked by all texts
    afterwards; a model has failed its check.
    """
    for part in parts:
        path = files.done_path(part.number)
        if exists(path) and not read_json(path, remedy(path)).get("checked"):
            ledger = read_ledger(files.ledger, part.number)
            write_ledger(files.ledger, part.number, doubted(ledger))
    remove_folder(files.working)


def check_rows(files: PartFiles, store: VectorStore, table: str, rows: int) -> None:
    """Raise if the store has fewer rows than its ledgers; the next job embeds those it lacks.

    Args:
        rows: of all ledgers.
    """
    there = store.count(table)
    if there > rows:
        logger.warning(
            "the store has %s rows of the table %r, but the index has %s: another program wrote to "
            "the table; remove its rows",
            *(f"{there:,}", table, f"{rows:,}"),
        )
    if there >= rows:
        return
    for number in range(files.parts):
        ledger = read_ledger(files.ledger, number)
        ids = _stored(store, table, number, ledger, ["id"])["id"]
        lacks = pc.invert(pc.is_in(ledger["id"], ids.combine_chunks()))
        write_ledger(files.ledger, number, doubted(ledger, lacks))
    remove_folder(files.working)
    raise ArtifactError(
        f"the store has {there:,} rows of the table {table!r}, but the index's ledger has {rows:,},"
        " so another program changed the table; start the same command again: it embeds the rows "
        "that the store lacks"
    )


def write_part(
    store: VectorStore, table: str, number: int, rows: pa.Table | None, delete: Sequence[str]
) -> None:
    """Write and delete rows of one part of a table.

    Stores with a method `write_part(table, number, rows, delete)`, such as files, keep the rows of
    a part together. They also have `read_part(table, number, columns)` and, if an index may get
    more parts, `divide_part(table, number, parts, part_of)` and `finish_division(table, parts)`.

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


def folders_in(path: str) -> list[str]:
    """List the names of the folders directly in a folder; none where it does not exist."""
    import pyarrow.fs

    filesystem, inside = open_storage(path)
    selector = pyarrow.fs.FileSelector(inside, allow_not_found=True)
    found = filesystem.get_file_info(selector)
    return sorted(info.base_name for info in found if info.type == pyarrow.fs.FileType.Directory)

"""Client of the store `faiss`: an index file of FAISS, with ids and rows beside it in Parquet.

    <to>/docs_1.faiss/000012.index     the index, as `faiss.read_index` reads it
                      000012.ids       Parquet with the ids in the order of the index
                      000003.rows      Parquet: rows that a call wrote, or `finish` wrote again
                      000011.deleted   Parquet: ids that a call deleted
                      table.json       layout, and the files that count

A call writes a file of its own under the next number, so it is there whole or not at all. `finish`
keeps the last row of each id, builds the index, and then replaces `table.json`, from which on the
new files count and the former ones are removed. One process writes at a time.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.atomic import full
from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import (
    exists,
    is_remote,
    join,
    list_files,
    open_storage,
    read_bytes,
    remove_file,
    store_file,
    write_atomic,
)
from rayembed.errors import ArtifactError, ConfigError, StorageError
from rayembed.machine.quantisation import to_bits
from rayembed.search.faiss_library import require_faiss
from rayembed_extras.indexing.store import VECTOR, Layout, SearchResults
from rayembed_extras.indexing.stores.faiss_file import FaissStore
from rayembed_extras.indexing.stores.faiss_indexes import last_line, new_index, set_options
from rayembed_extras.indexing.stores.layouts import (
    check_layout,
    checked_queries,
    checked_rows,
    layout_from,
    layout_values,
    padded,
)
from rayembed_extras.indexing.stores.table_folder import TableFolder, index_of

_ROWS_AT_ONCE = 8192
"""Largest number of rows of a batch that `scan` yields and an index takes at a time."""

_TRAINED_ON = 100_000
"""Number of rows, evenly taken, that an index with centroids is trained on."""

_REMEDY = "Build the index again"
_SETTINGS = {"factory", "train_rows"}


class _State(NamedTuple):
    """Content of `table.json`."""

    layout: Layout
    last: int
    """Number up to which files are counted by this state alone; those after it are new calls."""
    rows: list[str]
    """Files of rows, in the order of the index."""
    built: str | None
    """Number of the index and the ids; None: there is none yet, or no row."""
    settings: dict[str, Any]
    """Settings that the index was built by."""


class _Opened(NamedTuple):
    """An index in memory."""

    path: str
    options: str
    index: Any
    ids: np.ndarray


class FaissTables:
    """FAISS files in a folder or bucket, a `store.VectorStore`."""

    has_parallel_writers: ClassVar[bool] = False

    def __init__(self, settings: FaissStore) -> None:
        """Open the folder of tables; nothing is read or written."""
        self._settings = settings
        self._folder = TableFolder(settings.to, ".faiss")
        self._opened: _Opened | None = None

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless tables can be written there and FAISS makes such an index."""
        del name
        if unknown := self._settings.index.keys() - _SETTINGS:
            raise ConfigError(
                f"store.index has {', '.join(sorted(unknown))}; the store faiss takes "
                f"{', '.join(sorted(_SETTINGS))}"
            )
        new_index(self._settings.index, layout)
        self._folder.check()

    def tables(self, name: str) -> list[str]:
        """List the tables of an index in the order of their numbers."""
        return self._folder.tables(name)

    def create(self, table: str, layout: Layout) -> None:
        """Create an empty table; does nothing if it exists with the same columns."""
        if exists(self._path(table, "table.json")):
            check_layout(table, self._state(table).layout, layout)
        else:
            self._write_state(table, _State(layout, 0, [], None, {}))

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows to a file of their own; they replace rows with the same ids."""
        rows = checked_rows(table, rows, self._state(table).layout)
        if rows.num_rows:
            self._add(table, "rows", rows)

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Note the ids to delete in a file of their own."""
        self._state(table)
        if len(ids):
            self._add(table, "deleted", pa.table({"id": pa.array(ids, pa.string())}))

    def finish(self, table: str, layout: Layout) -> None:
        """Keep the last row of each id, build the index, and let both count in one step."""
        state = self._state(table)
        check_layout(table, state.layout, layout)
        settings = dict(self._settings.index)
        calls = self._calls(table, state)
        if not calls and state.settings == settings and (state.built or not state.rows):
            self._remove_others(table, state)
            return
        last = int(calls[-1].partition(".")[0]) if calls else state.last
        # Files that a killed process wrote here count as calls: they have the last rows of ids.
        rows: list[str] = []
        for file, kept, size in self._kept(table, state):
            if len(kept) == size:
                rows.append(file)
            elif len(kept):
                last += 1
                rows.append(f"{last:06d}.rows")
                self._write(table, rows[-1], self._read(table, file).take(pa.array(kept)))
        state = _State(layout, last + 1, rows, None, settings)
        if rows:
            number = f"{last + 1:06d}"
            self._build(table, state, number)
            state = state._replace(built=number)
        self._write_state(table, state)
        self._remove_others(table, state)

    def count(self, table: str) -> int:
        """Count the rows of a table, also rows written since `finish`."""
        return sum(len(kept) for _, kept, _ in self._kept(table, self._state(table)))

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in batches, also rows written since `finish`."""
        state = self._state(table)
        names = state.layout.schema.names if columns is None else list(columns)
        for file, kept, _ in self._kept(table, state):
            if len(kept):
                rows = self._read(table, file, names).select(names).take(pa.array(kept))
                for first in range(0, len(rows), _ROWS_AT_ONCE):
                    yield rows.slice(first, _ROWS_AT_ONCE)

    def fetch(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of these ids, of those files that have some of them."""
        state = self._state(table)
        schema = pa.schema([state.layout.schema.field(name) for name in columns])
        wanted, found = pa.array(ids, pa.string()), [schema.empty_table()]
        for file, kept, _ in self._kept(table, state):
            there = pc.is_in(self._read(table, file, ["id"])["id"], wanted).to_numpy()
            if len(hits := kept[there[kept]]):
                rows = self._read(table, file, columns).select(schema.names)
                found.append(rows.take(pa.array(hits)).cast(schema))
        return pa.concat_tables(found).combine_chunks()

    def search(
        self, table: str, queries: np.ndarray, k: int, options: Mapping[str, Any] | None = None
    ) -> SearchResults:
        """Find the k nearest of the rows at the last `finish`, by inner product, or for bits by
        equal signs.

        Args:
            options: parameters of FAISS's search, such as `nprobe` or `efSearch`.
        """
        state = self._state(table)
        layout = state.layout
        queries = checked_queries(table, queries, layout.dimensions)
        if state.built is None or not len(queries):
            return padded([((), np.empty(0, np.float32))] * len(queries), k)
        opened = self._open(table, state, options or {})
        size = min(k, len(opened.ids))
        if layout.number_type == "bits":
            distances, rows = opened.index.search(to_bits(queries), size)
            scores = 1 - (2 / layout.dimensions) * distances
        elif layout.number_type == "int8":
            # FAISS cuts queries for int8 codes to whole numbers, at widths that SIMD divides.
            step = layout.scale / 127
            codes = np.clip(np.rint(queries / np.float32(step)), -127, 127)
            values, rows = opened.index.search(codes, size)
            scores = values * np.float32(step**2)
        else:
            scores, rows = opened.index.search(queries, size)
        found = [
            (opened.ids[of_query[of_query >= 0]].tolist(), of_scores[of_query >= 0])
            for of_query, of_scores in zip(rows, scores, strict=True)
        ]
        return padded(found, k)

    def point(self, name: str, table: str) -> None:
        """Let the name refer to this table, in `<name>.json`."""
        if index_of(table) != name or not exists(self._path(table, "table.json")):
            raise ConfigError(f"the index {name} has no table {table!r} in {self._folder.to!r}")
        self._folder.point(name, table)

    def pointed(self, name: str) -> str | None:
        """Return the table that the name refers to."""
        return self._folder.pointed(name)

    def drop(self, table: str) -> None:
        """Remove a table's folder."""
        self._folder.drop(table)

    def bytes_of(self, table: str) -> int:
        """Sum the bytes of a table's files, with its index and former versions."""
        return self._folder.bytes_of(table)

    def close(self) -> None:
        """Release the index in memory."""
        self._opened = None

    def _path(self, table: str, file: str) -> str:
        return join(self._folder.path(table), file)

    def _state(self, table: str) -> _State:
        path = self._path(table, "table.json")
        if not exists(path):
            raise ArtifactError(f"there is no table {table!r} in {self._folder.to!r}")
        values = read_json(path, _REMEDY)
        try:
            return _State(layout_from(values.pop("layout")), **values)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"the file {path!r} is broken: {error!r}. {_REMEDY}") from error

    def _write_state(self, table: str, state: _State) -> None:
        values = {**state._asdict(), "layout": layout_values(state.layout)}
        write_json(self._path(table, "table.json"), values)

    def _calls(self, table: str, state: _State) -> list[str]:
        """Files of calls since the last `finish`, in their order."""
        files = list_files(self._folder.path(table), recursive=False)
        endings = (".rows", ".deleted")
        named = [file for file in files if file.endswith(endings) and file[:1].isdigit()]
        calls = [file for file in named if int(file.partition(".")[0]) > state.last]
        return sorted(calls, key=lambda file: int(file.partition(".")[0]))

    def _add(self, table: str, ending: str, rows: pa.Table) -> None:
        state = self._state(table)
        calls = self._calls(table, state)
        last = int(calls[-1].partition(".")[0]) if calls else state.last
        self._write(table, f"{last + 1:06d}.{ending}", rows)

    def _write(self, table: str, file: str, rows: pa.Table) -> None:
        content = parquet_bytes(rows, _ROWS_AT_ONCE, statistics=False)
        write_atomic(self._path(table, file), content)

    def _read(self, table: str, file: str, columns: Sequence[str] | None = None) -> pa.Table:
        return read_sealed(self._path(table, file), columns, remedy=_REMEDY)

    def _kept(self, table: str, state: _State) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yield each file of rows, newest first, with the positions of its rows that no later call
        replaces or deletes, and the number of all its rows.
        """
        over: set[str] = set()
        for file in [*reversed(self._calls(table, state)), *state.rows]:
            ids = self._read(table, file, ["id"])["id"].to_pylist()
            if file.endswith(".rows"):
                kept = np.array([n for n, name in enumerate(ids) if name not in over], np.int64)
                yield file, kept, len(ids)
            over.update(ids)

    def _remove_others(self, table: str, state: _State) -> None:
        """Remove the files that no longer count, also files of a killed `finish`."""
        wanted = {*state.rows, "table.json", f"{state.built}.index", f"{state.built}.ids"}
        for file in list_files(self._folder.path(table), recursive=False):
            number = file.partition(".")[0]
            if file not in wanted and number.isdigit() and int(number) <= state.last:
                remove_file(self._path(table, file))

    def _build(self, table: str, state: _State, number: str) -> None:
        """Build the index and write it with its ids."""
        index = new_index(self._settings.index, state.layout)
        ids = [self._read(table, file, ["id"]) for file in state.rows]
        count = sum(map(len, ids))
        if not index.is_trained:
            wanted = min(int(self._settings.index.get("train_rows", _TRAINED_ON)), count)
            some = np.linspace(0, count - 1, wanted).round().astype(np.int64)
            drawn: list[np.ndarray] = []
            first = 0
            for vectors in self._vectors(table, state):
                inside = some[(some >= first) & (some < first + len(vectors))] - first
                drawn.append(vectors[inside])
                first += len(vectors)
            self._of_faiss(table, index.train, np.concatenate(drawn))
        for vectors in self._vectors(table, state):
            index.add(vectors)
        self._write(table, f"{number}.ids", pa.concat_tables(ids).combine_chunks())
        self._write_index(self._path(table, f"{number}.index"), index, state.layout)

    def _vectors(self, table: str, state: _State) -> Iterator[np.ndarray]:
        """Yield the stored vectors in the number type that FAISS takes."""
        for file in state.rows:
            column = self._read(table, file, [VECTOR])[VECTOR].combine_chunks()
            values = column.flatten().to_numpy(zero_copy_only=False)
            values = values.reshape(len(column), column.type.list_size)
            kind = np.uint8 if state.layout.number_type == "bits" else np.float32
            for first in range(0, len(values), _ROWS_AT_ONCE):
                yield np.ascontiguousarray(values[first : first + _ROWS_AT_ONCE], kind)

    def _of_faiss(self, table: str, call: Callable[[np.ndarray], None], rows: np.ndarray) -> None:
        try:
            call(rows)
        except RuntimeError as error:
            raise ConfigError(
                f"store.index.factory: FAISS cannot train {self._settings.index['factory']!r} on "
                f"{len(rows):,} rows of the table {table}: {last_line(error)}"
            ) from error

    def _write_index(self, path: str, index: Any, layout: Layout) -> None:
        faiss = require_faiss("files of the store faiss")
        write = faiss.write_index_binary if layout.number_type == "bits" else faiss.write_index
        with _file_for(path) as file:
            try:
                write(index, str(file))
            except RuntimeError as error:
                text = str(error)
                if "No space left" in text or "quota" in text.lower():
                    raise full(path, error) from error
                raise StorageError(f"cannot write {path!r}: {last_line(error)}") from error

    def _open(self, table: str, state: _State, options: Mapping[str, Any]) -> _Opened:
        """Read the index, unless this one is in memory with the same options of searches."""
        faiss = require_faiss("files of the store faiss")
        path, text = self._path(table, f"{state.built}.index"), json.dumps(dict(options))
        opened = self._opened
        if opened is not None and (opened.path, opened.options) == (path, text):
            return opened
        bits = state.layout.number_type == "bits"
        try:
            if is_remote(path):
                content = np.frombuffer(read_bytes(path, _REMEDY), np.uint8)
                index = (faiss.deserialize_index_binary if bits else faiss.deserialize_index)(
                    content
                )
            else:
                file = open_storage(path)[1]
                index = (faiss.read_index_binary if bits else faiss.read_index)(file)
        except RuntimeError as error:
            problem = f"FAISS cannot read {path!r}: {last_line(error)}. {_REMEDY}"
            raise ArtifactError(problem) from error
        set_options(faiss, index, options)
        ids = self._read(table, f"{state.built}.ids")["id"].to_numpy(zero_copy_only=False)
        if len(ids) != index.ntotal:
            raise ArtifactError(
                f"{path!r} has {index.ntotal:,} vectors, but {len(ids):,} ids. {_REMEDY}"
            )
        self._opened = _Opened(path, text, index, ids)
        return self._opened


@contextmanager
def _file_for(path: str) -> Iterator[Path]:
    """Path of a local file for a library that writes it; at the end the file is at `path`."""
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / "file"
            store_file(Path(folder) / "file", path)
        return
    target = Path(open_storage(path)[1])
    # Numbered, so that `finish` removes what a killed process leaves.
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)

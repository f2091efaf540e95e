"""Tables of Parquet files in a folder, the client of the store `parquet`.

    <to>/<name>.json                     the current table: {"table": "docs_1"}
    <to>/<table>/_layout.json            dimensions, number type, columns, pattern of part files
    <to>/<table>/part-000012.parquet     rows of one part, by the hash of the document's id
                 rows-<hash>.parquet     rows that were written without a part

Search is exact: it reads all vectors. Divided parts have files of other names, such as
part-000012-of-000064.parquet, which readers read as soon as the layout has their pattern.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.arrow_files import open_parquet, parquet_bytes, read_sealed
from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import (
    check_writable,
    exists,
    join,
    list_files,
    open_storage,
    remove_file,
    write_atomic,
)
from rayembed.errors import ArtifactError, ConfigError, PlacementError, StorageError
from rayembed.machine.quantisation import from_bits, to_bits
from rayembed.search.exact import top_k
from rayembed_extras.indexing.layout import ARROW_TYPES, arrow_types, loaded_vectors
from rayembed_extras.indexing.store import VECTOR, Layout, SearchResults
from rayembed_extras.indexing.stores.layouts import checked_queries, checked_rows
from rayembed_extras.indexing.stores.row_lookup import rows_of_ids
from rayembed_extras.indexing.stores.table_folder import TableFolder

_LAYOUT = "_layout.json"
"""File whose name readers of the folder leave out."""

_PARTS, _OTHERS = "part-??????.parquet", "rows-*.parquet"
"""Patterns of the files of a new table: of parts, and of rows without a part."""

Made = TypeVar("Made")


class ParquetTables:
    """Tables of Parquet files in a folder; a `store.VectorStore`."""

    has_parallel_writers: ClassVar[bool] = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._tables = TableFolder(folder, "")

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless the folder can be written."""
        try:
            check_writable(self.folder)
        except PlacementError as error:
            reason = str(error).partition(": ")[2]
            raise ConfigError(f"store.to={self.folder!r} cannot be written: {reason}") from error

    def tables(self, name: str) -> list[str]:
        """List the tables of an index, also those whose removal was stopped midway."""
        return self._tables.tables(name)

    def create(self, table: str, layout: Layout) -> None:
        """Write the table's layout; raises where there is another one, or rows without one."""
        values = {
            "dimensions": layout.dimensions,
            "number_type": layout.number_type,
            "scale": layout.scale,
            "has_text": layout.has_text,
            "metadata": _names_of(layout.metadata),
        }
        if not exists(self._path(table, _LAYOUT)):
            # A removal was stopped, or another program wrote them.
            if self._files(table, "*.parquet"):
                raise ConfigError(
                    f"{self._path(table)!r} has files of rows but no {_LAYOUT}, so nothing can be "
                    "written beside them; remove this folder and run the same command again"
                )
            write_json(self._path(table, _LAYOUT), {**values, "files": _PARTS}, indent=2)
            return
        there = self._values(table)
        there.pop("files")
        if there != values:
            raise ConfigError(
                f"the table {table!r} in {self.folder!r} has other columns or vectors "
                f"({there}) than asked ({values}); give the index another --name, "
                "or another folder (--to)"
            )

    def write_part(
        self, table: str, number: int, rows: pa.Table | None, delete: Sequence[str]
    ) -> None:
        """Replace and delete rows of one part, whose rows are all in one file."""
        self._rewrite(table, _part_file(self._pattern(table), number), rows, delete)

    def read_part(self, table: str, number: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of one part."""
        name = _part_file(self._pattern(table), number)
        if not exists(self._path(table, name)):
            schema = self.layout(table).schema
            return pa.schema([schema.field(one) for one in columns]).empty_table()
        return self._read(table, name, columns).select(list(columns))

    def divide_part(
        self,
        table: str,
        number: int,
        parts: int,
        part_of: Callable[[pa.ChunkedArray], np.ndarray],
    ) -> None:
        """Write the rows of one part into files of the parts that their documents will belong to.

        Nobody reads these files before `finish_division`; a repeated call writes them again.

        Args:
            parts: number of parts after the division.
            part_of: function from documents to the numbers of their parts.
        """
        before, after = self._pattern(table), _pattern_of(parts)
        path = self._path(table, _part_file(before, number))
        if before == after or not exists(path):
            return
        rows = self._read(table, _part_file(before, number))
        numbers = part_of(rows["document"])
        for part in np.unique(numbers).tolist():
            content = parquet_bytes(rows.filter(pa.array(numbers == part)), statistics=False)
            write_atomic(self._path(table, _part_file(after, part)), content)

    def finish_division(self, table: str, parts: int) -> None:
        """Let readers read the divided parts, in one step, and remove the files of the former
        ones; may be repeated.

        Args:
            parts: number of parts after the division.
        """
        pattern = _pattern_of(parts)
        values = {**self._values(table), "files": pattern}
        write_json(self._path(table, _LAYOUT), values, indent=2)
        for name in self._files(table, "part-*.parquet"):
            if not fnmatchcase(name, pattern):
                remove_file(self._path(table, name))

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows into a file named by their ids, and remove these ids from other files.

        Rows that a killed call replaces stand in two files until it is repeated; jobs use
        `write_part`, which replaces one file.
        """
        ids = rows["id"].to_pylist()
        name = f"rows-{xxhash.xxh3_128_hexdigest(repr(sorted(ids)).encode())}.parquet"
        self._rewrite(table, name, rows, ())
        self._remove(table, ids, without=name)

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Delete rows, whichever file they are in; reads the ids of all files."""
        self._remove(table, ids)

    def finish(self, table: str, layout: Layout) -> None:
        """Do nothing: each file is complete when it appears."""

    def count(self, table: str) -> int:
        """Count the rows of a table, by the files' footers."""
        return self._whole(table, lambda names: sum(self._length(table, name) for name in names))

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of one file after the other.

        Raises:
            StorageError: an update divided the parts meanwhile, and removed their files.
        """
        before = self._pattern(table)
        names = self._whole(table, list)
        try:
            yield from self._scan(table, names, columns)
        except ArtifactError as error:
            if self._pattern(table) == before:
                raise
            raise StorageError(
                f"an update divided the parts of the table {table!r} while it was read; read the "
                "table again"
            ) from error

    def fetch(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of these ids, file by file until all are read."""
        read = list(dict.fromkeys(["id", *columns]))
        schema = self.layout(table).schema
        empty = pa.schema([schema.field(name) for name in read]).empty_table()
        rows = self._whole(
            table, lambda names: rows_of_ids(self._scan(table, names, read), ids, empty)
        )
        return rows.select(list(columns))

    def search(
        self, table: str, queries: np.ndarray, k: int, options: Mapping[str, Any] | None = None
    ) -> SearchResults:
        """Find the k nearest rows exactly, reading one file of vectors at a time."""
        if options:
            raise ConfigError(f"the store parquet has no options of a search, not {dict(options)}")
        layout = self.layout(table)
        queries = checked_queries(table, queries, layout.dimensions)
        if not len(queries):
            return SearchResults([], np.empty((0, k), np.float32))
        if layout.number_type == "bits":  # by the number of equal signs, as other stores do
            queries = from_bits(to_bits(queries), layout.dimensions)

        def nearest(names: list[str]) -> tuple[np.ndarray, np.ndarray, list[pa.ChunkedArray]]:
            columns = []

            def shards() -> Iterator[np.ndarray]:
                for name in names:
                    # In one read: an update may replace the file between two.
                    rows = self._read(table, name, ["id", VECTOR])
                    columns.append(rows["id"])
                    yield loaded_vectors(rows[VECTOR], layout)

            return (*top_k(queries, shards(), k), columns)

        scores, places, columns = self._whole(table, nearest)
        ids = np.full(places.shape, "", dtype=object)
        ends = np.cumsum([len(column) for column in columns])
        for column, end in zip(columns, ends.tolist(), strict=True):
            first = end - len(column)
            here = (places >= first) & (places < end)
            if here.any():
                found = column.take(pa.array(places[here] - first))
                ids[here] = np.array(found.to_pylist(), dtype=object)
        return SearchResults(ids.tolist(), scores)

    def point(self, name: str, table: str) -> None:
        """Write the small file that names the current table."""
        self._tables.point(name, table)

    def pointed(self, name: str) -> str | None:
        """Read the name of the current table; None: there is none."""
        return self._tables.pointed(name)

    def drop(self, table: str) -> None:
        """Remove a table's folder."""
        self._tables.drop(table)

    def bytes_of(self, table: str) -> int:
        """Sum the bytes of a table's files."""
        return self._tables.bytes_of(table)

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def layout(self, table: str) -> Layout:
        """Read the layout of a table."""
        values = self._values(table)
        values.pop("files")
        metadata = arrow_types(values.pop("metadata"))
        return Layout(metadata=metadata, **values)

    def _values(self, table: str) -> dict[str, Any]:

        remedy = "The table is gone or incomplete; build the index again under another name"
        return read_json(self._path(table, _LAYOUT), remedy)

    def _path(self, table: str, *names: str) -> str:

        return join(self.folder, table, *names)

    def _pattern(self, table: str) -> str:
        """Pattern of the files of the parts that readers read."""
        return str(self._values(table)["files"])

    def _files(self, table: str, *patterns: str) -> list[str]:

        there = list_files(self._path(table), recursive=False)
        return [name for name in there if any(fnmatchcase(name, one) for one in patterns)]

    def _whole(self, table: str, read: Callable[[list[str]], Made]) -> Made:
        """Return what a function reads of the files of all rows; it is called again where an update
        divided the parts meanwhile, which removes their files.
        """
        while True:
            pattern = self._pattern(table)
            try:
                made = read(self._files(table, pattern, _OTHERS))
            except (ArtifactError, OSError):
                if self._pattern(table) == pattern:
                    raise
                continue
            if self._pattern(table) == pattern:
                return made

    def _scan(
        self, table: str, names: Sequence[str], columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:

        for name in names:
            rows = self._read(table, name, columns)
            if len(rows):
                yield rows if columns is None else rows.select(list(columns))

    def _length(self, table: str, name: str) -> int:
        filesystem, inside = open_storage(self._path(table, name))
        with filesystem.open_input_file(inside) as file:
            return int(open_parquet(file).metadata.num_rows)

    def _read(self, table: str, name: str, columns: Sequence[str] | None = None) -> pa.Table:

        remedy = "Remove the file and the index's ledger of its part, and update the index"
        return read_sealed(self._path(table, name), columns, remedy=remedy)

    def _rewrite(self, table: str, name: str, rows: pa.Table | None, delete: Sequence[str]) -> None:
        """Replace the rows of the same ids in a file, delete others, and append new ones."""
        path = self._path(table, name)
        layout = self.layout(table)
        tables = [] if rows is None else [checked_rows(table, rows, layout)]
        if exists(path):
            there = self._read(table, name)
            gone = pa.array([*delete, *(rows["id"].to_pylist() if rows is not None else ())])
            kept = there.filter(pc.invert(pc.is_in(there["id"], gone.cast(pa.string()))))
            tables.insert(0, kept)
        if tables:
            write_atomic(path, parquet_bytes(pa.concat_tables(tables), statistics=False))

    def _remove(self, table: str, ids: Sequence[str], without: str = "") -> None:

        gone = pa.array(list(ids), pa.string())
        for name in self._files(table, self._pattern(table), _OTHERS):
            if name == without:
                continue
            there = self._read(table, name, ["id"])["id"]
            if pc.any(pc.is_in(there, gone)).as_py():
                self._rewrite(table, name, None, list(ids))


def _part_file(pattern: str, number: int) -> str:
    return pattern.replace("??????", f"{number:06d}")


def _pattern_of(parts: int) -> str:
    """Pattern of the files after a division into this number of parts."""
    return f"part-??????-of-{parts:06d}.parquet"


def _names_of(metadata: Mapping[str, pa.DataType]) -> dict[str, str]:

    names = {kind: name for name, kind in ARROW_TYPES.items()}
    return {column: names[kind] for column, kind in metadata.items()}

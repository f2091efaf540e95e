"""Read and write Parquet files and Arrow streams; types whose values run code when read are
refused.

Files of our own are sealed, so that no flipped bit is read as another value: each page has a
checksum, and in front of the footer, which has none, stands its digest. Other readers of Parquet
never look there.

    pages with their checksums | seal of the footer | footer | its length | PAR1

Libraries add types of their own to Arrow, which a file names in its schema. Ray Data has one whose
values are pickles: wherever `ray.data` was imported, a text of such a column would be unpickled
when it is read, and could do anything.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayembed.assets.array_files import SEAL_BYTES, check_seal, is_seal, seal_of
from rayembed.assets.clients import is_unanswered, why
from rayembed.assets.storage import open_storage, read_bytes
from rayembed.errors import ArtifactError, StorageError

Footers = dict[str, pq.FileMetaData]
"""Footer of the last file read, by path."""

_MAGIC = b"PAR1"
_END_BYTES = 8
"""Length of the end of every Parquet file: footer size and `PAR1`."""

_READ_AT_ONCE = 1 << 17
"""Bytes read from the end of a file, which contain most footers completely."""


def parquet_bytes(
    table: pa.Table,
    rows_per_group: int | None = None,
    rows_at_once: int | None = None,
    *,
    statistics: bool = True,
) -> bytes:
    """Serialise a table as a Parquet file whose footer is secured by a checksum.

    Args:
        rows_at_once: no row group holds rows on both sides of a multiple of it; None: of any.
        statistics: whether the footer tells the least and the largest value of each column of each
            row group, which may be whole texts.
    """
    buffer = pa.BufferOutputStream()
    stride = rows_at_once or max(len(table), 1)
    with pq.ParquetWriter(
        buffer,
        table.schema,
        compression="zstd",
        write_page_checksum=True,
        write_statistics=statistics,
    ) as writer:
        for first in range(0, max(len(table), 1), stride):
            writer.write_table(table.slice(first, stride), row_group_size=rows_per_group)
    content = memoryview(buffer.getvalue())
    footer = len(content) - _END_BYTES - _length(content[-_END_BYTES:])
    return b"".join([content[:footer], seal_of(content[footer:]), content[footer:]])


def read_sealed(
    path: str,
    columns: Sequence[str] | None = None,
    *,
    remedy: str,
    rows: range | None = None,
    footers: Footers | None = None,
) -> pa.Table:
    """Read a range of rows of a file made by `parquet_bytes`, local or in object storage.

    Args:
        columns: their names; `a.list.element.b` reads one field of a list of structures.
        remedy: what to do where the file is missing or broken, a whole sentence.
        rows: consecutive rows that are read, and no row group without any of them; None: all.
        footers: where the file's footer is kept, so that it is read once.

    Raises:
        ArtifactError: the file is missing or broken.
        StorageError: the storage does not give it.
    """
    kept = {} if footers is None else footers
    filesystem, inside = open_storage(path)
    try:
        with filesystem.open_input_file(inside) as file:
            return _rows_of(file, path, columns, rows, kept)
    except (OSError, ValueError, pa.ArrowException) as error:
        if is_unanswered(error):
            raise StorageError(f"cannot read {path!r}: {why(error)}") from error
        kept.clear()
    # Arrow tells a broken file and a storage that fails alike. In memory only the file can be at
    # fault, and what was the storage's is gone.
    content = read_bytes(path, remedy)
    try:
        with pa.BufferReader(content) as file:
            return _rows_of(file, path, columns, rows, kept)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ArtifactError(f"the file {path!r} is broken: {error}. {remedy}") from error


def _rows_of(
    file: pa.NativeFile,
    path: str,
    columns: Sequence[str] | None,
    rows: range | None,
    footers: Footers,
) -> pa.Table:
    footer = footers.get(path)
    if footer is None:
        footer = _sealed_footer(file)
        # Other threads may do the same with another file: what is used here is held here.
        footers.clear()
        footers[path] = footer
    # Ranges are read together: one request, where each column of each row group would be one.
    reader = open_parquet(file, metadata=footer, pre_buffer=True)
    names = None if columns is None else list(columns)
    if rows is None:
        return reader.read_row_groups(range(reader.num_row_groups), columns=names)
    first, groups = _groups_of(footer, rows)
    return reader.read_row_groups(groups, columns=names).slice(rows.start - first, len(rows))


def _groups_of(footer: pq.FileMetaData, rows: range) -> tuple[int, list[int]]:
    """Return the row groups that hold any of the rows, and the first row of the first such
    group.

    Raises:
        ValueError: the file has fewer rows.
    """
    if rows.stop > footer.num_rows:
        raise ValueError(
            f"the file has {footer.num_rows:,} rows, but row {rows.stop - 1:,} was requested"
        )
    ends = np.cumsum([footer.row_group(g).num_rows for g in range(footer.num_row_groups)])
    groups = range(
        int(np.searchsorted(ends, rows.start, side="right")),
        int(np.searchsorted(ends, rows.stop, side="left")) + 1,
    )
    return int(ends[groups[0] - 1]) if groups[0] else 0, list(groups)


def _sealed_footer(file: pa.NativeFile) -> pq.FileMetaData:
    """Read and verify the footer of a file made by `parquet_bytes`.

    Raises:
        ValueError: it is not what was written, or the file is none of `parquet_bytes`.
    """
    seal, footer = _end_of(file)
    check_seal(footer, seal)
    return _parsed(footer)


def _footer_of_any(file: pa.NativeFile) -> pq.FileMetaData | None:
    """Read the footer of any Parquet file, with or without checksum; None if unreadable, so that
    Arrow's own error explains why.

    Raises:
        pyarrow.ArrowInvalid: it has a seal and is not what was written.
    """
    try:
        seal, footer = _end_of(file)
    except ValueError:
        return None
    if is_seal(seal):
        try:
            check_seal(footer, seal)
        except ValueError as error:
            raise pa.ArrowInvalid(str(error)) from error
    return _parsed(footer)


def _end_of(file: pa.NativeFile) -> tuple[bytes, bytes]:
    """Read a Parquet file's footer, and the bytes before it, where a checksum would be.

    Raises:
        ValueError: it does not end as a file with both does.
    """
    size = file.size()
    end = file.read_at(min(size, _READ_AT_ONCE), max(0, size - _READ_AT_ONCE))
    if end[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("the file does not end with the bytes 'PAR1', as every Parquet file does")
    length = _length(end[-_END_BYTES:]) + _END_BYTES
    if size < SEAL_BYTES + length:
        raise ValueError(
            f"the Parquet footer should have {length:,} bytes, but the whole file has {size:,} "
            "bytes"
        )
    if len(end) < SEAL_BYTES + length:
        end = file.read_at(SEAL_BYTES + length, size - SEAL_BYTES - length)
    return end[-length - SEAL_BYTES : -length], end[-length:]


def _parsed(footer: bytes) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer))


def _length(end: bytes | memoryview) -> int:
    return int.from_bytes(end[:4], "little")


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file for reading.

    Args:
        source: an open file. Pages that have a checksum are checked by it, a footer that has a seal
            by that.
        options: of `pyarrow.parquet.ParquetFile`.

    Raises:
        pyarrow.ArrowInvalid: it is none, its footer is not what was written, two columns have one
            name, or a column has a type as the module names them.
        OSError: it cannot be read.
    """
    try:
        if "metadata" not in options:  # read once, here or by Arrow
            options["metadata"] = _footer_of_any(source)
        file = pq.ParquetFile(source, page_checksum_verification=True, **options)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8: {error}") from error
    check_plain(file.schema_arrow)
    _check_names(file.schema_arrow.names)
    return file


def read_stream(source: Any) -> pa.Table:
    """Read the rows of an Arrow stream.

    Raises:
        pyarrow.ArrowInvalid: as `open_parquet`.
    """
    reader = pa.ipc.open_stream(source)
    check_plain(reader.schema)
    return reader.read_all()


def check_plain(schema: pa.Schema) -> None:
    """Raise if a column, also a nested one, has an extension type, since reading it would run that
    type's code.

    Raises:
        pyarrow.ArrowInvalid: one has; the message names it.
    """
    for field in schema:
        if (name := _foreign(field.type)) is not None:
            raise pa.ArrowInvalid(
                f"the column {field.name!r} has the type {name!r}, which runs code when its values "
                "are read (Ray's own types hold pickles, which can run anything); write the column "
                "as plain texts, numbers or lists"
            )


def _check_names(names: Sequence[str]) -> None:
    """Raise if two columns have the same name, because code that reads by name would get an
    arbitrary one.

    Raises:
        pyarrow.ArrowInvalid: two have.
    """
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise pa.ArrowInvalid(
            f"two columns are named {twice!r}, so one of them would be lost; rename or remove one"
        )


def _foreign(dtype: pa.DataType) -> str | None:
    """Name of an extension type at any depth of `dtype` whose Python class would build the values;
    None if there is none.
    """
    if isinstance(dtype, pa.BaseExtensionType):
        # Those that Python classes define may make their values themselves; Arrow's own do not.
        of_python = isinstance(dtype, pa.ExtensionType)
        if of_python and dtype.__arrow_ext_scalar_class__() is not pa.ExtensionScalar:
            return str(dtype.extension_name)
        return _foreign(dtype.storage_type)
    if pa.types.is_dictionary(dtype):
        return _foreign(dtype.value_type)
    inner = (_foreign(dtype.field(place).type) for place in range(dtype.num_fields))
    return next((name for name in inner if name is not None), None)

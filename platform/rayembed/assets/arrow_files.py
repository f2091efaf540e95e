"""Parquet files and Arrow streams, of which no value is made by running code.

Libraries add types of their own to Arrow, which a file names in its schema. Ray Data has one whose
values are pickles: wherever `ray.data` was imported, a text of such a column would be unpickled
when it is read, and could do anything.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """A Parquet file to read from.

    Args:
        source: an open file, or a buffer.
        options: of `pyarrow.parquet.ParquetFile`.

    Raises:
        pyarrow.ArrowInvalid: it is none, or a column has a type as the module names them.
        OSError: it cannot be read.
    """
    file = pq.ParquetFile(source, **options)
    check_plain(file.schema_arrow)
    return file


def read_parquet(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a Parquet file.

    Raises:
        pyarrow.ArrowInvalid: as `open_parquet`.
    """
    file = open_parquet(pa.BufferReader(content))
    return file.read(columns=None if columns is None else list(columns))


def read_stream(source: Any) -> pa.Table:
    """The rows of an Arrow stream.

    Raises:
        pyarrow.ArrowInvalid: as `open_parquet`.
    """
    reader = pa.ipc.open_stream(source)
    check_plain(reader.schema)
    return reader.read_all()


def check_plain(schema: pa.Schema) -> None:
    """Return when no column, nested ones too, has a type whose values a library makes.

    Raises:
        pyarrow.ArrowInvalid: one has; the message names it.
    """
    for field in schema:
        if (name := _foreign(field.type)) is not None:
            raise pa.ArrowInvalid(
                f"the column {field.name!r} has the type {name!r}, whose values are made by code "
                "when they are read (Ray's are pickles, which can run any); write the column as "
                "plain texts, numbers or lists"
            )


def _foreign(dtype: pa.DataType) -> str | None:
    """The name of such a type in a type; None: there is none."""
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

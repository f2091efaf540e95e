"""Columns of PostgreSQL for Arrow types, and vectors in pgvector's binary format.

A part's vectors are one NumPy array of the wire format's records, so no Python object is made of a
component: https://github.com/pgvector/pgvector/blob/master/src/vector.c (`vector_send`).
"""

import decimal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.adapt import Buffer, Dumper, Loader
from psycopg.pq import Format
from psycopg.types.json import Jsonb
from pyarrow import types

from rayembed.errors import ConfigError
from rayembed_extras.indexing.stores.json_values import as_json, from_json

SQL_VECTORS = {"float32": "vector", "float16": "halfvec", "bits": "bit"}
"""Number type → type of PostgreSQL."""
BIT_OID = 1560


class Wire(bytes):
    """A vector in the binary format of its type."""


class _Float32Wire(Wire):
    pass


class _Float16Wire(Wire):
    pass


class _BitsWire(Wire):
    pass


_WIRES: dict[str, type[Wire]] = {
    "float32": _Float32Wire,
    "float16": _Float16Wire,
    "bits": _BitsWire,
}
"""Number type → class by which psycopg knows the type of a value."""


class _WireDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Any) -> Buffer | None:
        return bytes(obj)


class _WireLoader(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def register(connection: psycopg.Connection[Any], oids: Mapping[str, int]) -> None:
    """Let a connection write values as `Wire` and read them as bytes.

    Args:
        oids: of the types of `SQL_VECTORS`, by name.
    """
    for number_type, wire in _WIRES.items():
        oid = oids[SQL_VECTORS[number_type]]
        connection.adapters.register_dumper(wire, type("", (_WireDumper,), {"oid": oid}))
        connection.adapters.register_loader(oid, _WireLoader)


def sql_type(kind: pa.DataType) -> str:
    """Return PostgreSQL's type for a metadata column: `jsonb` where it has no plain one."""
    if types.is_dictionary(kind):
        return sql_type(kind.value_type)
    plain: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
        (_is_text, "text"),
        (types.is_null, "text"),
        (types.is_boolean, "boolean"),
        (types.is_uint64, "numeric"),
        (types.is_integer, "bigint"),
        (types.is_floating, "double precision"),
        (types.is_date, "date"),
        (types.is_decimal, "numeric"),
        (_is_bytes, "bytea"),
    )
    for matches, name in plain:
        if matches(kind):
            return name
    if types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if _is_list(kind) and _is_text(kind.value_type):
        return "text[]"
    return "jsonb"


def row_types(schema: pa.Schema, vector: int) -> list[int | str]:
    """Return the types of a row's columns for a binary COPY; `vector` is the oid of its type."""
    fixed: dict[str, int | str] = {"chunk": "int4", "vector": vector}
    return [fixed.get(field.name) or _COPY_NAMES[sql_type(field.type)] for field in schema]


_COPY_NAMES = {
    "text": "text",
    "boolean": "bool",
    "numeric": "numeric",
    "bigint": "int8",
    "double precision": "float8",
    "date": "date",
    "bytea": "bytea",
    "timestamptz": "timestamptz",
    "timestamp": "timestamp",
    "text[]": "text[]",
    "jsonb": "jsonb",
}


def to_rows(rows: pa.Table, dimensions: int, number_type: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table as values that psycopg writes.

    Raises:
        ConfigError: a text holds a NUL character, which PostgreSQL does not store.
    """
    columns: list[Sequence[Any]] = []
    for field in rows.schema:
        column = rows[field.name]
        if field.name == "vector":
            values = np.asarray(column.combine_chunks().flatten())
            columns.append(to_wire(values.reshape(len(rows), -1), dimensions, number_type))
        else:
            _refuse_nul(field, column, rows["id"])
            columns.append(_python_values(column, field.type))
    return zip(*columns, strict=True)


def from_rows(rows: Sequence[tuple[Any, ...]], schema: pa.Schema, number_type: str) -> pa.Table:
    """Build an Arrow table from rows that a cursor gave in the order of the schema's columns."""
    arrays = []
    for field, values in zip(schema, zip(*rows, strict=True), strict=True):
        if field.name == "vector":
            flat = from_wire(values, field.type.list_size, number_type).reshape(-1)
            items = pa.array(flat, field.type.value_type)
            arrays.append(pa.FixedSizeListArray.from_arrays(items, type=field.type))
        else:
            arrays.append(_arrow_values(list(values), field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def to_wire(vectors: np.ndarray, dimensions: int, number_type: str) -> list[Wire]:
    """Convert N vectors, (N, D) or packed bits (N, ceil(D / 8)), to N values of pgvector."""
    record = _record(vectors.shape[1], number_type)
    wire = np.zeros(len(vectors), record)
    wire["length"] = dimensions
    wire["values"] = vectors
    data, size = wire.tobytes(), record.itemsize
    wire_class = _WIRES[number_type]
    return [wire_class(data[start : start + size]) for start in range(0, len(data), size)]


def from_wire(values: Sequence[bytes], width: int, number_type: str) -> np.ndarray:
    """Convert N values of pgvector to (N, width) float32, float16 or packed bits."""
    array = np.frombuffer(b"".join(values), _record(width, number_type))["values"]
    return array.astype(array.dtype.newbyteorder("="))


def _record(width: int, number_type: str) -> np.dtype[Any]:
    if number_type == "bits":
        return np.dtype([("length", ">i4"), ("values", "u1", (width,))])
    item = {"float32": ">f4", "float16": ">f2"}[number_type]
    return np.dtype([("length", ">u2"), ("unused", ">u2"), ("values", item, (width,))])


def _python_values(column: pa.ChunkedArray, kind: pa.DataType) -> list[Any]:
    name = sql_type(kind)
    if name == "jsonb":
        return [None if value is None else Jsonb(value) for value in as_json(column)]
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    if types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    values: list[Any] = column.to_pylist()
    if types.is_uint64(column.type):
        return [None if value is None else decimal.Decimal(value) for value in values]
    return values


def _arrow_values(values: list[Any], kind: pa.DataType) -> pa.Array:
    if sql_type(kind) == "jsonb":
        return from_json(values, kind)
    if types.is_dictionary(kind):
        return _arrow_values(values, kind.value_type).dictionary_encode().cast(kind)
    if types.is_timestamp(kind):
        return pa.array(values, pa.timestamp("us", kind.tz)).cast(kind)
    if types.is_floating(kind):
        return pa.array(values, pa.float64()).cast(kind)
    if types.is_uint64(kind):
        values = [None if value is None else int(value) for value in values]
    return pa.array(values, kind)


def _refuse_nul(field: pa.Field, column: pa.ChunkedArray, ids: pa.ChunkedArray) -> None:
    """Raise if a text, also one of a list or of JSON, holds a NUL character."""
    if sql_type(field.type) in ("jsonb", "text[]"):
        rows = (number for number, value in enumerate(column.to_pylist()) if _holds_nul(value))
        row = next(rows, None)
    elif sql_type(field.type) == "text" and not types.is_null(field.type):
        text = column.cast(field.type.value_type) if types.is_dictionary(field.type) else column
        number = pc.index(pc.match_substring(text, "\0"), True).as_py()
        row = None if number < 0 else number
    else:
        return
    if row is not None:
        raise ConfigError(
            f"row {ids[row].as_py()!r}: the column {field.name!r} holds a NUL character, which "
            "PostgreSQL does not store in texts; remove it from the documents"
        )


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_holds_nul(item) for item in (*value, *value.values()))
    return isinstance(value, list | tuple) and any(_holds_nul(item) for item in value)


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))

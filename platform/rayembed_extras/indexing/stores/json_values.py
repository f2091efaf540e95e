"""Arrow values as JSON and back, for stores whose metadata are JSON documents."""

import base64
import datetime
import decimal
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import types


def as_json(column: pa.ChunkedArray) -> list[Any]:
    """Convert a column to values of JSON: times as ISO 8601, decimals as text, bytes as base64,
    maps as lists of pairs. NaN and infinities, which JSON does not have, become null.
    """
    return [_plain(value) for value in column.to_pylist()]


def from_json(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Build an Arrow array from the values that `as_json` made of one of this type."""
    if types.is_dictionary(kind):
        return from_json(values, kind.value_type).dictionary_encode().cast(kind)
    convert = _reader(kind)
    array = [None if value is None else convert(value) for value in values]
    if types.is_float16(kind):
        return pa.array(array, pa.float64()).cast(kind)
    return pa.array(array, kind)


def _plain(value: Any) -> Any:
    match value:
        case float():
            result: Any = value if math.isfinite(value) else None
        case list() | tuple():
            result = [_plain(item) for item in value]
        case dict():
            result = {name: _plain(item) for name, item in value.items()}
        case datetime.datetime() | datetime.date() | datetime.time():
            result = value.isoformat()
        case datetime.timedelta():
            result = value // datetime.timedelta(microseconds=1)
        case decimal.Decimal():
            result = str(value)
        case bytes():
            result = base64.b64encode(value).decode()
        case _:
            result = value
    return result


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return the function that converts a JSON value other than null to the Python value of an
    Arrow type.
    """
    if types.is_map(kind):
        key, item = _or_none(_reader(kind.key_type)), _or_none(_reader(kind.item_type))
        return lambda value: [(key(k), item(v)) for k, v in value]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        element = _or_none(_reader(kind.value_type))
        return lambda value: [element(item) for item in value]
    if types.is_struct(kind):
        fields = {field.name: _or_none(_reader(field.type)) for field in kind}
        return lambda value: {name: read(value.get(name)) for name, read in fields.items()}
    return next((read for matches, read in _LEAVES if matches(kind)), lambda value: value)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


_LEAVES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], Any]], ...] = (
    (types.is_timestamp, datetime.datetime.fromisoformat),
    (types.is_date, datetime.date.fromisoformat),
    (types.is_time, datetime.time.fromisoformat),
    (types.is_duration, lambda value: datetime.timedelta(microseconds=value)),
    (types.is_decimal, decimal.Decimal),
    (_is_bytes, base64.b64decode),
)


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)

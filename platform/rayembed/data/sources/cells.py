"""Parsing of row cells: texts, class names, numbers, codes."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rayembed.data.sources.columns import read_column


class RowError(Exception):
    """A row cannot be used; the message is the reason, short and common to many rows."""


def texts_in(row: Mapping[str, Any], column: str, *, json_lists: bool = False) -> list[str]:
    """Texts in a cell with a text or a list of texts; none if it is empty.

    Args:
        json_lists: a text that is a JSON list of texts stands for these, as in the cells of CSV
            and TSV, which hold no lists.

    Raises:
        RowError: it holds something else.
    """
    value = read_column(row, column)
    if value is None:
        return []
    if isinstance(value, str):
        return _texts_of_json(value) if json_lists and value.startswith("[") else [value]
    if not isinstance(value, list) or not _all_texts(value):
        raise RowError(f"column {column!r} is neither a text nor a list of texts")
    return [text for text in value if text is not None]


def text_in(row: Mapping[str, Any], column: str) -> str | None:
    """Text in a cell, or None if it is empty.

    Raises:
        RowError: it holds something else.
    """
    value = read_column(row, column)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RowError(f"column {column!r} is not a text")
    return value


def name_in(row: Mapping[str, Any], column: str) -> str | None:
    """Name of a class, a relation or an id in a cell; None if it is empty.

    Numbers are named by their digits, in any storage format; a list of one element is treated as
    that element.

    Raises:
        RowError: it holds several, or an object.
    """
    value = read_column(row, column)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    match value:
        case None | "" | []:
            return None
        case str():
            return value
        case bool():
            return str(value).lower()
        case float() if value.is_integer():
            return str(int(value))
        case float() if math.isnan(value):
            return None
        case int() | float():
            return str(value)
        case list():
            raise RowError(f"column {column!r} holds several values")
    raise RowError(f"column {column!r} is neither a name nor a number")


def number_in(row: Mapping[str, Any], column: str) -> float:
    """Number in a cell, also given as digits in a text.

    Raises:
        RowError: it is empty or holds something else.
    """
    value = read_column(row, column)
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            pass
        else:
            if not math.isnan(number):
                return number
    raise RowError(f"column {column!r} is no number")


def is_unicode(text: str) -> bool:
    """Whether the text is encodable; JSON admits unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts_of_json(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    if not isinstance(parsed, list) or not _all_texts(parsed):
        return [text]
    return [item for item in parsed if item is not None]


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str | None) for value in values)

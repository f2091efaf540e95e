"""Read the cells of rows: find a column, also within nested cells, and read texts, names and
numbers.

The grammar of columns is described in `rayembed.config.sources`; it applies to all that settings
name.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from rayembed.config.types import is_unicode

_QUOTED_FIRST = re.compile(r"""[bru]?['"]|(?:None|nan|null)\b""")
_QUOTED_LAST = re.compile(r"""(?:['"]|\b(?:None|nan|null))\Z""")
"""Pattern of the text between the brackets of a list of texts, from first to last quote."""

_ARRAY = re.compile(
    r"(?:(?:np|numpy)\.)?(?:array|frozenset|set|Index)\((.*?)(?:,\s*dtype=[^()]*)?\)", re.DOTALL
)
_LIST_BEGINS = "[({anfsI"
"""Characters that can start a list in JSON or Python syntax."""

_LINES = ("first_line", "other_lines")


class RowError(Exception):
    """Raised if a row cannot be used; the message is a short reason by which rejected rows are
    counted.
    """


def read_column(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column in a row; None if it is missing.

    A column of exactly this name counts first, dots or not. Otherwise dots lead into nested cells:
    `answers.text`. A list on the way, of objects or of lists, gives one flat list; a number leads
    to that element of a list, `set.0`. `title+text` joins texts of one level by a space and leaves
    out empty ones: `passages.title+text`, be `passages` an object, a list of objects or an object
    of lists; a text beside a list joins each of its elements. A value that is no text is not
    joined but given back, for the reader to refuse. Of a text, `text.first_line` and
    `text.other_lines` are its two parts, None where there is nothing but space.
    """
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    if dot:
        return _below(row.get(head), rest)
    names = column.split("+")
    return _joined({name: row.get(name) for name in names}) if len(names) > 1 else None


def names_at_the_top(column: str) -> set[str]:
    """Return the top-level columns to read for a column that settings name, such as a path into
    nested cells.
    """
    head = column.partition(".")[0]
    return {column, head, *head.split("+")}


def level_of(row: Mapping[str, Any], column: str) -> tuple[list[str], Mapping[str, Any]]:
    """Return the names that `column` looks up in the deepest object that it reaches, and that
    object.

    Used in messages about a missing column, to suggest the names beside it. For a list on the path,
    its first object counts. Returns no names if a cell on the path is empty, so that the row does
    not tell; the whole column if a cell is neither object nor list nor, for its lines, a text.
    """
    head, dot, rest = column.partition(".")
    if column in row or not dot:
        return [column] if column in row else head.split("+"), row
    below = row.get(head)
    while isinstance(below, list) and below:
        below = below[0]
        if rest.partition(".")[0].isdigit():
            rest = rest.partition(".")[2]
    if isinstance(below, Mapping) and rest:
        return level_of(below, rest)
    lines = isinstance(below, str) and rest in _LINES
    if head not in row or not rest or lines:
        return [head], row
    return ([] if below is None or below == [] else [column]), row


def texts_in(row: Mapping[str, Any], column: str, *, json_lists: bool = False) -> list[str]:
    """Return the texts in a cell that holds a text or a list of texts; none if it is empty.

    Args:
        json_lists: a text that is a JSON list of texts stands for these, as in the cells of CSV
            and TSV, which hold no lists; elsewhere it is a text.

    Raises:
        RowError: it holds something else, such as a list in Python's form, `['a', 'b']`.
    """
    value = read_column(row, column)
    if value is None:
        return []
    if isinstance(value, int | float) and not isinstance(value, bool):
        name = name_in(row, column)
        return [] if name is None else [name]
    if isinstance(value, str):
        return _texts_of(value, column, json_lists=json_lists)
    if not isinstance(value, list) or not _all_texts(value):
        raise RowError(f"column {column!r} is neither a text nor a list of texts")
    return [text for text in value if text is not None]


def text_in(row: Mapping[str, Any], column: str) -> str | None:
    """Return the text in a cell, or None if it is empty; a number becomes the text of its
    digits.

    Raises:
        RowError: it holds something else.
    """
    value = read_column(row, column)
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return name_in(row, column)
    if isinstance(value, bytes):
        raise RowError(f"column {column!r} holds bytes, not a text; decode them")
    if not isinstance(value, str):
        raise RowError(f"column {column!r} is not a text")
    return value


def name_in(row: Mapping[str, Any], column: str) -> str | None:
    """Return the class name, relation or id in a cell; None if it is empty.

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
            raise RowError(f"column {column!r} contains a list, not one value")
    raise RowError(f"column {column!r} is neither a name nor a number")


def number_in(row: Mapping[str, Any], column: str) -> float:
    """Return the finite number in a cell, also if it is written as a text.

    Raises:
        RowError: it is empty or holds something else.
    """
    value = read_column(row, column)
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            pass
        else:
            if math.isfinite(number):
                return number
    raise RowError(f"column {column!r} is not a number")


def is_encodable(row: Mapping[str, Any], read: Collection[str] | None) -> bool:
    """Whether the cells that are read (None: all) are valid Unicode, without half of a surrogate
    pair.
    """
    cells = {name: cell for name, cell in row.items() if read is None or name in read}
    return is_unicode(json.dumps(cells, ensure_ascii=False))


def looks_like_list(text: str) -> bool:
    """Whether a text looks like a list, tuple, set or array of texts in JSON or Python syntax,
    complete or truncated.

    A text in brackets, `[Solved] …` or `[1, 2]`, is none: of a list the first and the last element
    are in quotes, or nothing (`None`, `nan`), or one of them is and Python can read it.
    """
    text = text.strip()
    if not text or text[0] not in _LIST_BEGINS:
        return False
    if (array := _ARRAY.fullmatch(text)) is not None:
        return looks_like_list(array[1])
    if text[0] + text[-1] not in ("[]", "()", "{}"):
        return False
    inner = text[1:-1].strip(" \t\r\n,")
    first, last = _QUOTED_FIRST.match(inner), _QUOTED_LAST.search(inner)
    if text[0] == "[" and first and last:
        return True
    return bool(first or last) and _is_of_python(text)


def _is_of_python(text: str) -> bool:
    """Whether a text is a Python list, tuple or set that contains a text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about backslashes in texts
            value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return isinstance(value, list | tuple | set) and any(isinstance(one, str) for one in value)


def _texts_of(text: str, column: str, *, json_lists: bool) -> list[str]:
    """Return the texts of a list that is written as a JSON text, else the text itself."""
    begin = text.lstrip()[:1]
    if not begin or begin not in _LIST_BEGINS:
        return [text]
    parsed = None
    if begin == "[":
        with suppress(ValueError, RecursionError):
            parsed = json.loads(text)
    if parsed is not None and not json_lists:
        return [text]
    if isinstance(parsed, list) and _all_texts(parsed):
        return [item for item in parsed if item is not None]
    if isinstance(parsed, list) and any(isinstance(item, str | list | dict) for item in parsed):
        raise RowError(f"column {column!r} is a JSON list, but not of texts")
    if parsed is None and looks_like_list(text):
        raise RowError(
            f"column {column!r} is a list that is not JSON: write it by json.dumps(list), not "
            "str(list)"
        )
    return [text]


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str | None) for value in values)


def _below(value: Any, rest: str) -> Any:
    if isinstance(value, Mapping):
        return read_column(value, rest)
    if isinstance(value, str):
        return _lines_of(value, rest)
    if not isinstance(value, list):
        return None
    head, dot, below = rest.partition(".")
    if head.isdigit():
        chosen = value[int(head)] if int(head) < len(value) else None
        return _below(chosen, below) if dot else chosen
    found: list[Any] = []
    for element in value:
        inner = _below(element, rest)
        if isinstance(inner, list):
            found.extend(inner)
        else:
            found.append(inner)
    return found


def _lines_of(text: str, which: str) -> str | None:
    """Return the first line of a text, or its remaining lines, stripped; None if that is empty."""
    if which not in _LINES:
        return None
    first, _, others = text.partition("\n")
    return (first if which == _LINES[0] else others).strip() or None


def _joined(fields: Mapping[str, Any]) -> Any:
    """Join the texts of several fields with spaces; lists of equal length are joined element by
    element.
    """
    lengths = {len(value) for value in fields.values() if isinstance(value, list)}
    if not lengths:
        return _joined_texts(list(fields.values()))
    if len(lengths) > 1:
        return dict(fields)
    (length,) = lengths
    columns = [v if isinstance(v, list) else [v] * length for v in fields.values()]
    return [_joined_texts(list(values)) for values in zip(*columns, strict=True)]


def _joined_texts(values: list[Any]) -> Any:
    given = [value for value in values if value is not None]
    other = next((value for value in given if not isinstance(value, str)), None)
    if other is not None:
        return other
    return " ".join(text for text in given if text.strip()) or None

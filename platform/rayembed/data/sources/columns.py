"""Column access in rows; a column may be a path into nested cells.

The grammar is described in `rayembed.config.sources`; it applies to all columns that settings name.
"""

from collections.abc import Mapping
from typing import Any

_LINES = ("first_line", "other_lines")


def read_column(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column in a row; None if missing.

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


def level_of(row: Mapping[str, Any], column: str) -> tuple[list[str], Mapping[str, Any]]:
    """Names looked up by `column` in the deepest object that it reaches, and that object.

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
    """First line of a text, or the remaining lines, stripped."""
    if which not in _LINES:
        return None
    first, _, others = text.partition("\n")
    return (first if which == _LINES[0] else others).strip() or None


def _joined(fields: Mapping[str, Any]) -> Any:
    """Texts of several fields joined into one; lists of equal length are joined elementwise."""
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

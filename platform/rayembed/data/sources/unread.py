"""Detection of columns that look like part of a record but are not read."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.data import DatasetConfig
from rayembed.config.sources import SOURCES
from rayembed.data.sources.column_names import IDS, NEGATIVES, SCORES, look_of_name
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import Row, names_at_the_top, read_rows
from rayembed.errors import ArtifactError, ConfigError

_ID = re.compile(r"[!-~]*")
"""A single ASCII word, as of ids. Some languages write texts without spaces, but not in ASCII."""

_ROWS_LOOKED_AT = 1000
_FILES_LOOKED_AT = 64


def unread_columns(pieces: Sequence[FilePiece], read: Collection[str]) -> dict[str, str]:
    """Unread column → what it looks like, from the first rows of each file.

    Args:
        pieces: all pieces of the files; of very many files the first ones are looked at.
        read: columns, or paths into them, that settings name.
    """
    firsts = list({piece.name: piece for piece in reversed(pieces)}.values())[::-1]
    found: dict[str, str] = {}
    for piece in firsts[:_FILES_LOOKED_AT]:
        for name, look in _unread_in(piece, read).items():
            found[name] = look if look == NEGATIVES else found.get(name, look)
    return found


def _unread_in(piece: FilePiece, read: Collection[str]) -> dict[str, str]:
    known = {name for column in read for name in names_at_the_top(column)}
    looks = {name: look_of_name(name) for name in _names(piece) if name not in known}
    # Rows that are lists have numbers in place of names.
    asked = [name for name, look in looks.items() if look == NEGATIVES or name.isdigit()]
    if asked:
        rows = islice(read_rows(piece, asked), _ROWS_LOOKED_AT)
        seen = [row.values for row in rows if isinstance(row, Row)]
        for name in asked:
            values = [value for row in seen for value in _elements(row.get(name))]
            looks[name] = _look_of_unnamed(values) if name.isdigit() else _of_negatives(values)
    return {name: look for name, look in looks.items() if look is not None}


def _of_negatives(values: Sequence[Any]) -> str | None:
    """What the cells of a column are whose name says negatives."""
    if not values:
        return None
    return NEGATIVES if _are_texts(values) else IDS


def _look_of_unnamed(values: Sequence[Any]) -> str | None:
    """What the cells of a column without a name are, beside a query and its positive: texts of
    triples are negatives, numbers scores, and single words anything.
    """
    if not values:
        return None
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return SCORES
    return NEGATIVES if _are_texts(values) else None


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(v, str) for v in values) and not all(map(_ID.fullmatch, values))


def unread_negatives(dataset: DatasetConfig, unread: Mapping[str, str]) -> ConfigError | None:
    """Error text when a stage requests hard negatives and the data set has some in an unread
    column; None if it has none.

    Single words count as ids of documents or classes, not as texts.
    """
    source = dataset.source
    setting = source.settings_by_look.get(NEGATIVES)
    if setting is None or dataset.has_negatives:
        return None
    if getattr(source, setting) is not None:  # `[]`, on purpose
        return None
    columns = [name for name, look in unread.items() if look == NEGATIVES]
    if not columns:
        return None
    setting = f"data.datasets.{dataset.name}.source.{setting}"
    has = f"a column {_named(columns)}" if len(columns) == 1 else f"columns {_named(columns)}"
    return ConfigError(
        f"{source.place!r} has {has}, a stage asks for hard negatives of its rows, and {setting} "
        f"is null, so that nobody would read them: set '{setting}={_value(columns)}', or "
        f"'{setting}=[]' to train without them"
    )


def unread_warning(manifest: Mapping[str, Any]) -> str | None:
    """One warning line about a data set's unread columns; None if there are none.

    Args:
        manifest: of its converted records, with what `unread_columns` found.
    """
    columns: dict[str, str] = manifest.get("unread_columns", {})
    if not columns:
        return None
    name, source = manifest["dataset"], manifest["inputs"]["settings"]["source"]
    if source.get("negatives") == []:  # on purpose
        columns = {column: look for column, look in columns.items() if look != NEGATIVES}
    looks = dict.fromkeys(columns.values())
    told = [_told(name, source, look, [c for c in columns if columns[c] == look]) for look in looks]
    return f"data set {name}: no setting reads {'; '.join(told)}" if told else None


def _told(dataset: str, source: Mapping[str, Any], look: str, columns: Sequence[str]) -> str:
    kind = SOURCES.classes().get(source["kind"])  # None: of a package that is not here
    setting = getattr(kind, "settings_by_look", {}).get(look)
    fix = ""
    if setting:
        read = source.get(setting) or []
        read = [read] if isinstance(read, str) else list(read)
        at = f"data.datasets.{dataset}.source.{setting}"
        if look == NEGATIVES:
            it = "it" if len(columns) == 1 else "them"
            fix = f": set '{at}={_value([*read, *columns])}' to use {it}"
        elif read:
            fix = f": {at} reads {read[0]!r} in place of it"
        else:
            fix = f": set '{at}={columns[0]}' to use it"
    return f"{_named(columns)} (looks like {look}{fix})"


def _named(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def _value(columns: Sequence[str]) -> str:
    """Columns as a command-line setting value."""
    return columns[0] if len(columns) == 1 else f"[{', '.join(columns)}]"


def _names(piece: FilePiece) -> list[str]:
    """Columns of the piece, from its schema or its first rows."""
    if piece.kind != "parquet":
        rows = islice(read_rows(piece), _ROWS_LOOKED_AT)
        return list({name: None for row in rows if isinstance(row, Row) for name in row.values})
    filesystem, inside = open_source(piece.path)
    try:
        with filesystem.open_input_file(inside) as file:
            return list(open_parquet(file).schema_arrow.names)
    except reading_errors(piece.path) as error:
        raise ArtifactError(f"cannot read the rows {piece.path!r}: {error}") from error


def _elements(value: Any) -> list[Any]:
    """Non-empty elements of a cell."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if one is not None and (not isinstance(one, str) or one.strip())]

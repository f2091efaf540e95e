"""Detection of columns that look like part of a record but are not read."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.data import DatasetConfig
from rayembed.config.sources import SOURCES
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import Row, names_at_the_top, read_rows
from rayembed.errors import ArtifactError, ConfigError

NEGATIVES, IDS, SCORES = "negatives", "ids of negatives", "scores"
LABELS, INSTRUCTIONS = "labels", "instructions"

_LOOKS = {
    NEGATIVES: r"(hard_)?(neg|negative)s?(_(texts?|passages?|documents?|docs?|ctxs))?(_?\d+)?",
    SCORES: r"(\w+_)?(scores?|similarit(y|ies)|relevance)(_?\d+)?",
    LABELS: r"labels?|class(es)?|category|categories|topics?|cluster(_id)?",
    INSTRUCTIONS: r"(query_)?(instructions?|prompts?|tasks?|task_(description|definition))",
}
"""Meaning of a column by its lower-case name."""

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
    found = {}
    for name in _names(piece):
        look = _look(name)
        if name not in known and look is not None:
            found[name] = look
    negatives = [name for name, look in found.items() if look == NEGATIVES]
    if negatives:
        rows = islice(read_rows(piece, negatives), _ROWS_LOOKED_AT)
        seen = [row.values for row in rows if isinstance(row, Row)]
        for name in negatives:
            values = [value for row in seen for value in _elements(row.get(name))]
            if not values:
                del found[name]
            elif not all(isinstance(v, str) for v in values) or all(map(_ID.fullmatch, values)):
                found[name] = IDS
    return found


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


def _look(name: str) -> str | None:
    plain = re.sub(r"[\s-]+", "_", name.strip().lower())
    return next((look for look, form in _LOOKS.items() if re.fullmatch(form, plain)), None)


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

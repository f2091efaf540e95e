"""Detection of columns that look like part of a record but are not read."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.data import DatasetConfig
from rayembed.config.sources import SOURCES
from rayembed.data.sources.column_names import (
    IDS,
    LABELS,
    NEGATIVES,
    PAIR_LABELS,
    SCORES,
    TEXTS,
    look_of_name,
)
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import Row, names_at_the_top, read_rows
from rayembed.errors import ArtifactError, ConfigError

_ID = re.compile(r"[!-~]*")
"""A single ASCII word, as of ids. Some languages write texts without spaces, but not in ASCII."""

_NO, _YES = ("0", "0.0", "false", "no"), ("1", "1.0", "true", "yes")

_FIELDS = ("text", "passage", "content", "contents", "document", "body")
"""Names of the text in lists of objects, as Tevatron's and BEIR's passages are."""

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
        found = merge_unread(found, _unread_in(piece, read))
    return found


def _unread_in(piece: FilePiece, read: Collection[str]) -> dict[str, str]:
    seen = UnreadColumns(read)
    seen.names(_names(piece))
    rows = islice(read_rows(piece, seen.asked), _ROWS_LOOKED_AT) if seen.asked else ()
    for row in rows:
        if isinstance(row, Row):
            seen.row(row.values)
    return seen.found()


class UnreadColumns:
    """Columns of rows that no setting reads, with some of their cells.

    Args:
        read: columns, or paths into them, that settings name.
    """

    def __init__(self, read: Collection[str]) -> None:
        self._known = {name for column in read for name in names_at_the_top(column)}
        self._looks: dict[str, str | None] = {}
        self._cells: dict[str, list[Any]] = {}

    @property
    def asked(self) -> list[str]:
        """Columns whose cells decide what they are."""
        return list(self._cells)

    def names(self, names: Iterable[str]) -> None:
        """Add columns by their names."""
        for name in names:
            if name in self._known:
                continue
            self._known.add(name)
            self._looks[name] = look = look_of_name(name)
            # Rows that are lists have numbers in place of names.
            if look in (NEGATIVES, LABELS) or name.isdigit():
                self._cells[name] = []

    def row(self, values: Mapping[str, Any]) -> None:
        """Add a row."""
        if not values.keys() <= self._known:
            self.names(values)
        for name, cells in self._cells.items():
            if len(cells) < _ROWS_LOOKED_AT and name in values:
                cells.extend(_elements(values[name]))

    def found(self) -> dict[str, str]:
        """Column → what it looks like, of those that look like part of a record."""
        told = (_told_by_cells(n, look, self._cells.get(n, [])) for n, look in self._looks.items())
        return {name: look for name, look in told if look is not None}


def merge_unread(found: dict[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """What columns look like in some rows, and in further ones."""
    merged = dict(found)
    for name, look in further.items():
        merged[name] = look if look in (NEGATIVES, TEXTS) else found.get(name, look)
    return merged


def _told_by_cells(name: str, look: str | None, values: Sequence[Any]) -> tuple[str, str | None]:
    """What a column looks like by its cells too, and its name or a path into it."""
    if name.isdigit():
        return name, _look_of_unnamed(values)
    if look == LABELS and _are_yes_and_no(values):
        return name, PAIR_LABELS
    if look != NEGATIVES:
        return name, look
    below = _texts_below(values)
    return (name, _of_negatives(values)) if below is None else (f"{name}.{below}", NEGATIVES)


def _of_negatives(values: Sequence[Any]) -> str | None:
    """What the cells of a column are whose name says negatives; None: flags, or nothing."""
    if all(_is_flag(value) for value in values):
        return None
    if _are_texts(values):
        return NEGATIVES
    return SCORES if _are_fractions(values) else IDS


def _look_of_unnamed(values: Sequence[Any]) -> str | None:
    """What the cells of a column without a name are, beside a query and its positive.

    Whole numbers and single words may be anything, mostly ids.
    """
    if not values:
        return None
    if _are_yes_and_no(values):
        return PAIR_LABELS
    if _are_fractions(values):
        return SCORES
    return TEXTS if _are_texts(values) else None


def _are_yes_and_no(values: Sequence[Any]) -> bool:
    """Whether they are flags and not all the same."""
    flags = all(map(_is_flag, values))
    return flags and len({str(value).lower() in _YES for value in values}) == 2


def _is_flag(value: Any) -> bool:
    return str(value).lower() in (*_NO, *_YES)


def _are_fractions(values: Sequence[Any]) -> bool:
    """Whether they are numbers, some of them not whole.

    Ids may be floats as well, where a table has gaps.
    """
    try:
        numbers = [_number(value) for value in values]
    except ValueError:
        return False
    return any(not number.is_integer() for number in numbers)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _texts_below(values: Sequence[Any]) -> str | None:
    """Path from objects to their texts, such as `title+text`; None: they are no such objects."""
    if not values or not all(isinstance(value, Mapping) for value in values):
        return None

    def has_texts(field: str) -> bool:
        found = [text for value in values for text in _elements(value.get(field))]
        return bool(found) and _are_texts(found)

    text = next(filter(has_texts, _FIELDS), None)
    titles = [title for value in values for title in _elements(value.get("title"))]
    titled = bool(titles) and all(isinstance(title, str) for title in titles)
    return f"title+{text}" if text and titled else text


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(v, str) for v in values) and not all(map(_ID.fullmatch, values))


def unread_negatives(dataset: DatasetConfig, unread: Mapping[str, str]) -> ConfigError | None:
    """Error text when a stage requests hard negatives and the data set has some in an unread
    column; None if it has none.

    Single words count as ids of documents or classes, not as texts. Texts without a name, in rows
    that are lists, may be dates or sources as well: they are warned of alone.
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
        columns = {c: look for c, look in columns.items() if look not in (NEGATIVES, TEXTS)}
    looks = dict.fromkeys(columns.values())
    told = [_told(name, source, look, [c for c in columns if columns[c] == look]) for look in looks]
    return f"data set {name}: no setting reads {'; '.join(told)}" if told else None


def _told(dataset: str, source: Mapping[str, Any], look: str, columns: Sequence[str]) -> str:
    if look == PAIR_LABELS:
        return f"{_named(columns)} (looks like {look}{_told_of_pairs(dataset, source, columns)})"
    kind = SOURCES.classes().get(source["kind"])  # None: of a package that is not here
    setting = getattr(kind, "settings_by_look", {}).get(NEGATIVES if look == TEXTS else look)
    fix = ""
    if setting:
        read = source.get(setting) or []
        read = [read] if isinstance(read, str) else list(read)
        at = f"data.datasets.{dataset}.source.{setting}"
        it = "it" if len(columns) == 1 else "them"
        if look in (NEGATIVES, TEXTS):
            when = "" if look == NEGATIVES else f", if {it} should be negatives"
            fix = f": set '{at}={_value([*read, *columns])}' to use {it}{when}"
        elif read:
            fix = f": {at} reads {read[0]!r} in place of it"
        else:
            fix = f": set '{at}={columns[0]}' to use it"
    return f"{_named(columns)} (looks like {look}{fix})"


def _told_of_pairs(dataset: str, source: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What to do about pairs that may be none: `source.label` of pairs would not leave them out."""
    if source["kind"] != "pairs":
        return ""
    query, positive = source.get("query", "query"), source.get("positive", "positive")
    return (
        f": each row is taken for a positive pair, be it one or not; leave the others out of the "
        f"file, or set 'data.datasets.{dataset}.source={{kind: nli, path: …, "
        f'premise: {query}, hypothesis: {positive}, label: {columns[0]}, entailment: "1", '
        'contradiction: "0"}\', with its values for "1" and "0", to have negatives of them'
    )


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

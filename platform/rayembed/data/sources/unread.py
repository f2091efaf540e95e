"""Columns that look like part of a record by name and cells, and that no setting reads."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.data import DatasetConfig
from rayembed.config.run import Run
from rayembed.config.sources import SOURCES
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import Row, names_at_the_top, read_rows
from rayembed.errors import ArtifactError, ConfigError

NEGATIVES, LABELS, INSTRUCTIONS = "negatives", "labels", "instructions"
PAIR_LABELS = "labels of pairs"
"""Whether a row's texts are a pair: not the class of a text, which `LABELS` are."""
TEXTS = "texts"

_WORDS = re.compile(r"[^\W\d_]+")
_TURNS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Beginnings of words in camelCase."""

_COUNTED = re.compile(r"\b(count|false|has|is|max|min|no?|not|num|number|share|total)\b")
"""Words of names of numbers, flags and opposites (`num_negatives`, `is_negative`,
`false_negatives`), whatever else they name."""
_NEGATIVE = (
    "((hard)?(neg|negative)s?|rejected|contradictions?|distractors?|irrelevant|non ?relevant)"
)
_TEXT = (
    "((abstract|answer|candidate|caption|chunk|code|completion|content|context|ctx|doc|document|"
    "example|hit|item|list|output|pair|paragraph|passage|question|response|sample|sentence|text|"
    "title)s?|query|queries)"
)
_LABEL = "(category|categories|class|classes|(cluster|intent|label|topic)s?)"
_NAMES = {
    INSTRUCTIONS: "(query )?(instructions?|prompts?|tasks?|task (description|definition))",
    NEGATIVES: f"(.* )?({_NEGATIVE}|({_NEGATIVE}|wrong|incorrect) (.* )?{_TEXT})",
    LABELS: f"(.* )?{_LABEL}( (id|idx|index|name|text))?",
}
"""What a column is whose words these are. As in English compounds the last word says it:
`negative_passages` are texts, a `negative_sentiment` is not."""
_OF_PAIRS = re.compile("is (.* )?(duplicate|equivalent|match|paraphrase|relevant|similar)")

_ID = re.compile(r"[!-~]*")
"""A single ASCII word, as of ids. Some languages write texts without spaces, but not in ASCII."""
_NO, _YES = ("0", "0.0", "false", "no"), ("1", "1.0", "true", "yes")
_FIELDS = ("text", "passage", "content", "contents", "document", "body")
"""Names of the text in lists of objects, as Tevatron's and BEIR's passages are."""

_ROWS_LOOKED_AT = 2000
_FILES_LOOKED_AT = 64


def look_of_name(name: str) -> str | None:
    """What a column looks like by its name; None: like nothing that training could read."""
    words = " ".join(_WORDS.findall(_TURNS.sub("_", name))).lower()
    if _OF_PAIRS.fullmatch(words):
        return PAIR_LABELS
    if _COUNTED.search(words):
        return None
    return next((look for look, names in _NAMES.items() if re.fullmatch(names, words)), None)


def unread_columns(pieces: Sequence[FilePiece], read: Collection[str]) -> dict[str, str]:
    """Unread column → what it looks like, from the first rows of each file.

    Args:
        pieces: all pieces of the files; of very many files the first ones are looked at.
        read: columns, or paths into them, that settings name.
    """
    known = {name for column in read for name in names_at_the_top(column)}
    firsts = {piece.name: piece for piece in reversed(pieces)}
    found: dict[str, str] = {}
    for piece in [*firsts.values()][::-1][:_FILES_LOOKED_AT]:
        columnar = piece.kind == "parquet"
        rows = [] if columnar else list(_first_rows(piece, None))
        there = _schema_names(piece) if columnar else dict.fromkeys(n for row in rows for n in row)
        names = [name for name in there if name not in known]
        asked = [n for n in names if n.isdigit() or look_of_name(n) in (NEGATIVES, LABELS)]
        if columnar and asked:
            rows = list(_first_rows(piece, asked))
        for name in names:
            cells = [cell for row in rows for cell in _elements(row.get(name))]
            path, look = _look(name, cells)
            if look is not None:
                found[path] = look
    return found


def _look(name: str, cells: Sequence[Any]) -> tuple[str, str | None]:
    """A column's name, or a path to the texts in it, and what it looks like."""
    # Rows that are lists have numbers in place of names.
    look = TEXTS if name.isdigit() else look_of_name(name)
    if look in (TEXTS, LABELS) and _are_yes_and_no(cells):
        return name, PAIR_LABELS
    if look == NEGATIVES and (below := _texts_below(cells)):
        return f"{name}.{below}", look
    return name, look if look not in (TEXTS, NEGATIVES) or _are_texts(cells) else None


def _are_yes_and_no(cells: Sequence[Any]) -> bool:
    """Whether they are flags and not all the same."""
    flags = {str(cell).lower() for cell in cells}
    return flags <= {*_NO, *_YES} and not flags.isdisjoint(_NO) and not flags.isdisjoint(_YES)


def _are_texts(cells: Sequence[Any]) -> bool:
    return all(isinstance(one, str) for one in cells) and not all(map(_ID.fullmatch, cells))


def _texts_below(cells: Sequence[Any]) -> str | None:
    """Path from objects to their texts, such as `title+text`; None: they are no such objects."""
    if not cells or not all(isinstance(cell, Mapping) for cell in cells):
        return None
    fields = {
        field: [text for cell in cells for text in _elements(cell.get(field))]
        for field in (*_FIELDS, "title")
    }
    text = next((field for field in _FIELDS if _are_texts(fields[field])), None)
    return f"title+{text}" if text and fields["title"] else text


def _schema_names(piece: FilePiece) -> list[str]:
    """Columns of a piece of a Parquet file."""
    filesystem, inside = open_source(piece.path)
    try:
        with filesystem.open_input_file(inside) as file:
            return list(open_parquet(file).schema_arrow.names)
    except reading_errors(piece.path) as error:
        raise ArtifactError(f"cannot read the rows {piece.path!r}: {error}") from error


def _first_rows(piece: FilePiece, columns: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    rows = islice(read_rows(piece, columns), _ROWS_LOOKED_AT)
    return (row.values for row in rows if isinstance(row, Row))


def _elements(value: Any) -> list[Any]:
    """Non-empty elements of a cell."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if one is not None and (not isinstance(one, str) or one.strip())]


def check_unread(run: Run, dataset: DatasetConfig, unread: Mapping[str, str]) -> None:
    """Check that no stage asks for hard negatives which stand in an unread column.

    Single words count as ids of documents or classes, not as texts. Texts without a name, in rows
    that are lists, may be dates or sources as well: they are warned of alone.

    Raises:
        ConfigError: one does.
    """
    source = dataset.source
    setting = source.settings_by_look.get(NEGATIVES)
    columns = [name for name, look in unread.items() if look == NEGATIVES]
    asks = any(s.batch.num_negatives for s in run.stages if dataset.name in s.datasets)
    if setting is None or dataset.has_negatives or not columns or not asks:
        return
    if getattr(source, setting) is not None:  # `[]`, on purpose
        return
    setting = f"data.datasets.{dataset.name}.source.{setting}"
    has = f"a column {_named(columns)}" if len(columns) == 1 else f"columns {_named(columns)}"
    raise ConfigError(
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
    told = [
        _told(name, source, look, [c for c in columns if columns[c] == look])
        for look in dict.fromkeys(columns.values())
    ]
    return f"data set {name}: no setting reads {'; '.join(told)}" if told else None


def _told(dataset: str, source: Mapping[str, Any], look: str, columns: Sequence[str]) -> str:
    """Columns of one look with what to set."""
    kind = SOURCES.classes().get(source["kind"])  # None: of a package that is not here
    setting = getattr(kind, "settings_by_look", {}).get(NEGATIVES if look == TEXTS else look)
    at, fix = f"data.datasets.{dataset}.source", ""
    if look == PAIR_LABELS and source["kind"] == "pairs":
        query, positive = source.get("query", "query"), source.get("positive", "positive")
        # `source.label`, of the classes of texts, would train on pairs that are none.
        fix = (
            ": each row is taken for a positive pair, be it one or not; leave the others out of "
            f"the file, or set '{at}={{kind: nli, path: …, premise: {query}, hypothesis: "
            f'{positive}, label: {columns[0]}, entailment: "1", contradiction: "0"}}\', with its '
            'values for "1" and "0", to have negatives of them'
        )
    elif setting and (look in (NEGATIVES, TEXTS) or not source.get(setting)):
        read = source.get(setting) or []
        read = [read] if isinstance(read, str) else read
        columns_set = [*read, *columns] if look in (NEGATIVES, TEXTS) else columns[:1]
        it = "it" if len(columns) == 1 else "them"
        when = f", if {it} should be negatives" if look == TEXTS else ""
        fix = f": set '{at}.{setting}={_value(columns_set)}' to use {it}{when}"
    elif setting:
        fix = f": {at}.{setting} reads {source[setting]!r} in place of it"
    return f"{_named(columns)} (looks like {look}{fix})"


def _named(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def _value(columns: Sequence[str]) -> str:
    """Columns as a command-line setting value."""
    return columns[0] if len(columns) == 1 else f"[{', '.join(columns)}]"

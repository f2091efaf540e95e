"""Columns and files of each kind of source."""

from rayembed.config.sources import (
    BeirSource,
    ClassesSource,
    GradedSource,
    NLISource,
    PairsSource,
    Source,
    STSSource,
)

_COLUMNS: dict[type, tuple[str, ...]] = {
    PairsSource: ("query", "positive", "negatives", "label", "instruction", "language", "id"),
    NLISource: ("premise", "hypothesis", "label", "language"),
    STSSource: ("first", "second", "score", "language"),
    GradedSource: ("first", "second", "score", "language"),
    ClassesSource: ("text", "label", "language", "id"),
    BeirSource: ("query_id", "document_id", "score"),
}

_FILES = ("path", "corpus", "queries")


def columns_of(source: Source) -> dict[str, str]:
    """Setting → its column of the files at `path`, if set.

    Several columns of negatives are there one by one: `negatives[0]`, `negatives[1]`.
    """
    named = ((setting, getattr(source, setting)) for setting in _COLUMNS.get(type(source), ()))
    columns = {setting: column for setting, column in named if isinstance(column, str)}
    if isinstance(source, PairsSource) and not isinstance(source.negatives, str):
        columns |= {f"negatives[{i}]": c for i, c in enumerate(negatives_of(source))}
    return columns


def negatives_of(source: PairsSource) -> tuple[str, ...]:
    """Columns of a source's negatives."""
    given = source.negatives
    return (given,) if isinstance(given, str) else given or ()


def paths_of(source: Source) -> dict[str, str]:
    """Setting → path of its files."""
    named = ((setting, getattr(source, setting, None)) for setting in _FILES)
    return {setting: path for setting, path in named if path is not None}

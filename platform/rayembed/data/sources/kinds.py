"""Which columns and files each kind of source has."""

from rayembed.config.sources import (
    BeirSource,
    ClassesSource,
    NLISource,
    PairsSource,
    Source,
    STSSource,
)

_COLUMNS: dict[type, tuple[str, ...]] = {
    PairsSource: ("query", "positive", "negatives", "label", "instruction", "language"),
    NLISource: ("premise", "hypothesis", "label", "language"),
    STSSource: ("first", "second", "score", "language"),
    ClassesSource: ("text", "label", "language"),
    BeirSource: ("query_id", "document_id", "score"),
}

_FILES = ("path", "corpus", "queries", "translations")


def columns_of(source: Source) -> dict[str, str]:
    """Setting → column of the files at `path`, for those that are set.

    A setting of several columns is there once for each: `negatives[0]`, `negatives[1]`.
    """
    columns = {}
    for setting in _COLUMNS.get(type(source), ()):
        match getattr(source, setting):
            case str() as column:
                columns[setting] = column
            case tuple() as several:
                columns.update({f"{setting}[{i}]": column for i, column in enumerate(several)})
    return columns


def paths_of(source: Source) -> dict[str, str]:
    """Setting → where it says that files lie."""
    named = ((setting, getattr(source, setting, None)) for setting in _FILES)
    return {setting: path for setting, path in named if path is not None}

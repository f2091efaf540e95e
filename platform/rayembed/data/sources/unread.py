"""Find columns that no setting reads, and advise about those whose names match a setting."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.data import DatasetConfig
from rayembed.config.run import Run
from rayembed.config.sources import SOURCES
from rayembed.data.sources.cells import names_at_the_top
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import Row, first_pieces, read_rows
from rayembed.errors import ArtifactError, ConfigError

_ROWS_LOOKED_AT = 2000
_NO_LETTERS = re.compile(r"[\W\d_]+")

_ADVICE = {
    "negatives": "set '{at}.negatives={columns}' to train on them",
    "instruction": "set '{at}.instruction={columns}' to use it",
    "label": (
        "each row is taken for a positive pair: where this says which rows are, leave the others "
        "out of the file, or take {at}.kind=nli; classes of texts are read by {at}.label"
    ),
}
"""Advice about columns that a setting could read."""


def unread_columns(pieces: Sequence[FilePiece], read: Collection[str]) -> tuple[str, ...]:
    """List the columns that no setting reads, from the first rows of each file.

    Args:
        pieces: all pieces of the files; of very many files the first ones are looked at.
        read: columns, or paths into them, that settings name.
    """
    known = {name for column in read for name in names_at_the_top(column)}
    names = dict.fromkeys(name for piece in first_pieces(pieces) for name in _names(piece))
    return tuple(name for name in names if name not in known)


def _names(piece: FilePiece) -> list[str]:
    if piece.kind == "text":
        return []
    if piece.kind != "parquet":
        rows = islice(read_rows(piece), _ROWS_LOOKED_AT)
        return [name for row in rows if isinstance(row, Row) for name in row.values]
    filesystem, inside = open_source(piece.path)
    try:
        with filesystem.open_input_file(inside) as file:
            return list(open_parquet(file).schema_arrow.names)
    except reading_errors(piece.path) as error:
        raise ArtifactError(f"cannot read the rows {piece.path!r}: {error}") from error


def _meant(source: Mapping[str, Any], unread: Collection[str]) -> dict[str, list[str]]:
    """Map each setting to the unread columns whose names match it.

    Args:
        source: its settings; negatives `[]` are none on purpose.
    """
    kind = SOURCES.classes().get(source["kind"])  # None: of a package that is not here
    found = {}
    for setting, names in getattr(kind, "names_by_setting", {}).items():
        given = source.get(setting)
        like = [n for n in unread if re.fullmatch(names, _NO_LETTERS.sub("", n).lower())]
        if like and (given is None or (setting == "negatives" and given)):
            found[setting] = like
    return found


def check_unread(run: Run, dataset: DatasetConfig, unread: Collection[str]) -> None:
    """Raise if a stage needs hard negatives that are in a column that no setting reads.

    Raises:
        ConfigError: one does.
    """
    columns = _meant(dataset.source.model_dump(), unread).get("negatives")
    asks = any(s.batch.num_negatives for s in run.stages if dataset.name in s.datasets)
    if dataset.has_negatives or not columns or not asks:
        return
    setting = f"data.datasets.{dataset.name}.source.negatives"
    has = "a column" if len(columns) == 1 else "columns"
    raise ConfigError(
        f"{dataset.source.place!r} has {has} {_named(columns)} and a stage uses hard negatives of "
        f"its rows, but {setting} is null, so hard negatives would not be read: set "
        f"'{setting}={_value(columns)}' (if the cells are objects, a path to their texts, such as "
        f"{columns[0]}.text), or '{setting}=[]' to train without them"
    )


def unread_warning(manifest: Mapping[str, Any]) -> str | None:
    """Make one warning about unread columns that a setting could read; None if there are
    none.

    Args:
        manifest: of a data set's converted records, with its `unread_columns`.
    """
    if not (unread := [one["column"] for one in manifest.get("unread_columns", ())]):
        return None
    name, source = manifest["dataset"], manifest["inputs"]["settings"]["source"]
    at = f"data.datasets.{name}.source"
    told = []
    for setting, columns in _meant(source, unread).items():
        before = source.get(setting) or []
        every = [*([before] if isinstance(before, str) else before), *columns]
        advice = _ADVICE[setting].format(at=at, columns=_value(every))
        told.append(f"{_named(columns)}: {advice}")
    return f"data set {name}: no setting reads {'; '.join(told)}" if told else None


def _named(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns))


def _value(columns: Sequence[str]) -> str:
    """Write columns as the value of a setting on the command line."""
    return columns[0] if len(columns) == 1 else f"[{', '.join(columns)}]"

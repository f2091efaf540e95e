"""Read and check a user's tables of texts with labels or scores, and write them for memory
mapping.

    classification, clustering       text, label
    pair classification              sentence1, sentence2, label: 1 for a pair that belongs together
    STS                              sentence1, sentence2, score: any number

Rows pass by one at a time. A row that cannot be scored is never left out silently: all are counted
and the first of each kind are shown.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import xxhash

from rayembed.data.sources.cells import RowError, name_in, number_in, text_in
from rayembed.data.sources.files import FilePiece
from rayembed.errors import DataError
from rayembed.evaluation.own_data import ABOUT, ArrowFile, Faults, readable_rows

Form = Literal["classes", "pairs", "grades"]
"""Columns of a table: texts with a class, pairs with 0 or 1, pairs with a number."""

_COLUMNS: Mapping[Form, tuple[str, ...]] = {
    "classes": ("text", "label"),
    "pairs": ("sentence1", "sentence2", "label"),
    "grades": ("sentence1", "sentence2", "score"),
}
_SCHEMAS: Mapping[Form, pa.Schema] = {
    "classes": pa.schema([("text", pa.string()), ("label", pa.int64())]),
    "pairs": pa.schema(
        [("sentence1", pa.string()), ("sentence2", pa.string()), ("label", pa.int64())]
    ),
    "grades": pa.schema(
        [("sentence1", pa.string()), ("sentence2", pa.string()), ("score", pa.float64())]
    ),
}

_BINARY = {"0": 0, "1": 1, "false": 0, "true": 1}


@dataclass(frozen=True)
class OwnTable:
    """Paths of the files with the rows of one split."""

    path: str
    split: str
    pieces: tuple[FilePiece, ...]


@dataclass(frozen=True)
class AboutTables:
    """Statistics of prepared tables."""

    fingerprint: str
    """Hash of texts, classes and grades, in the order of the files."""
    rows: dict[str, int]
    """Split → its number of rows."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers."""
    lowest: float = 0.0
    """Lowest grade."""
    highest: float = 0.0
    """Highest grade."""

    @property
    def num_texts(self) -> int:
        """Number of rows of all splits."""
        return sum(self.rows.values())


def table_file(folder: Path, split: str) -> Path:
    """Path of a split's file in a folder of `write_tables`."""
    return folder / f"{split}.arrow"


def write_tables(tables: tuple[OwnTable, ...], form: Form, folder: Path) -> AboutTables:
    """Write an Arrow file for each split, and `about.json` with the statistics.

    Classes are numbered in the order of their names, so that the order of rows decides nothing.

    Raises:
        DataError: rows without a text or a label, with a label or a score that is none, or data
            that no score can tell apart; bad rows are counted and the first of each kind shown.
        ArtifactError: a file cannot be read.
    """
    read = {table.split: _read(table, form) for table in tables}
    last = [row[-1] for rows in read.values() for row in rows]
    names: tuple[str, ...] = ()
    if form == "classes":
        names = tuple(sorted(set(last)))
        _check_classes(tables, {split: {row[-1] for row in rows} for split, rows in read.items()})
        numbers = {name: number for number, name in enumerate(names)}
        read = {
            split: [(text, numbers[name]) for text, name in rows] for split, rows in read.items()
        }
    elif len(set(last)) < 2:
        column = _COLUMNS[form][-1]
        raise DataError(
            f"all rows of {tables[0].path!r} have the same {column}, {last[0]}; a score needs at "
            "least two different values"
        )
    for split, rows in read.items():
        with ArrowFile(table_file(folder, split), _SCHEMAS[form]) as file:
            for row in rows:
                file.add(*row)
    about = AboutTables(
        xxhash.xxh3_128_hexdigest(repr((read, names)).encode()),
        {split: len(rows) for split, rows in read.items()},
        names,
        *((min(last), max(last)) if form == "grades" else ()),
    )
    (folder / ABOUT).write_text(json.dumps(asdict(about), indent=1), encoding="utf-8")
    return about


def read_about_tables(folder: Path) -> AboutTables:
    """Read the statistics that `write_tables` wrote."""
    values = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return AboutTables(**{**values, "classes": tuple(values["classes"])})


def _read(table: OwnTable, form: Form) -> list[tuple[Any, ...]]:
    faults, rows = Faults(), []
    for row in readable_rows(table.pieces, table.split, faults):
        try:
            rows.append(_cells(row.values, form))
        except RowError as problem:
            faults.add(table.split, str(problem), row.origin)
    faults.refuse(f"the rows at {table.path!r} cannot be scored as they stand")
    if not rows:
        raise DataError(f"there are no rows at {table.path!r}; nothing can be scored")
    return rows


def _cells(row: Mapping[str, Any], form: Form) -> tuple[Any, ...]:
    *texts, last = _COLUMNS[form]
    if missing := [column for column in (*texts, last) if column not in row]:
        raise RowError(f"the row has no column {missing[0]!r}")
    found = [_text(row, column) for column in texts]
    if form == "grades":
        return (*found, number_in(row, last))
    name = name_in(row, last)
    if name is None:
        raise RowError(f"no {last}")
    if form == "pairs":
        if name not in _BINARY:
            raise RowError(f"{last} must be 0 or 1")
        return (*found, _BINARY[name])
    return (*found, name)


def _text(row: Mapping[str, Any], column: str) -> str:
    text = text_in(row, column)
    if text is None or not text.strip():
        raise RowError(f"no {column}")
    return text


def _check_classes(tables: tuple[OwnTable, ...], found: Mapping[str, set[str]]) -> None:
    for table in tables:
        if len(found[table.split]) < 2:
            raise DataError(
                f"all rows at {table.path!r} have the class {min(found[table.split])!r}; a score "
                "needs at least two classes"
            )
    if unknown := sorted(found["test"] - found.get("train", found["test"])):
        shown = ", ".join(map(repr, unknown[:3]))
        raise DataError(
            f"the rows at {tables[0].path!r} have {len(unknown)} classes without a training "
            f"example ({shown}); add examples of these classes to the training file"
        )

"""Row reader of a piece: rows with their origins, and a check of the columns that settings name.

    file#row        Parquet, CSV, TSV: number of the row in the file, from 0
    file@byte       JSONL: where its line starts, in the content that a .gz file holds
    file            texts: the file's path below the folder

TSV knows no quotes, as its registered media type has it: a tab ends a cell, a line ends a row.
"""

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.fs
import yaml

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.settings import nearest
from rayembed.data.parts import remedy
from rayembed.data.sources.cells import is_unicode, level_of
from rayembed.data.sources.files import FilePiece
from rayembed.errors import ArtifactError, ConfigError

_ROWS_TO_FIND_COLUMNS = 1000
_ROWS_AT_ONCE = 1024
_FILES_LOOKED_AT = 64
_LARGEST_CELL = 1 << 30
_NOT_UTF8 = "not UTF-8"
_OF_TEXTS = ("id", "title", "text")
"""Columns of files of texts."""

_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?\n)??(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """A row as read."""

    origin: str
    values: Mapping[str, Any]
    json_lists: bool = False
    """Whether cells hold no lists, so that a text that is a JSON list stands for one."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read."""

    origin: str
    reason: str
    shown: str


def read_rows(piece: FilePiece, columns: Collection[str] | None = None) -> Iterator[Row | BadRow]:
    """Rows of a piece, in order.

    A line of JSONL that is a list has columns `0`, `1`, …; a file of a text has `id`, its path,
    `title`, which only the settings above it give, and `text`.

    Args:
        columns: those that will be read; of Parquet files no others are. None: all.

    Raises:
        ArtifactError: the file cannot be read.
    """
    filesystem, inside = open_source(piece.path)
    errors: tuple[type[Exception], ...] = (UnicodeError, csv.Error)
    errors += reading_errors(piece.path)
    try:
        match piece.kind:
            case "jsonl":
                yield from _read_jsonl(filesystem, inside, piece)
            case "csv" | "tsv":
                with filesystem.open_input_stream(inside) as stream:
                    yield from _read_csv(stream, piece)
            case "parquet":
                with filesystem.open_input_file(inside) as file:
                    yield from _read_parquet(file, piece, columns)
            case "text":
                yield from _read_texts(piece, errors)
    except errors as error:
        advice = f". {remedy(piece.path)}" if piece.made else ""
        told = f"cannot read the rows {piece.path!r}: {error}{advice}"
        raise ArtifactError(told) from error


def check_columns(
    piece: FilePiece, columns: Mapping[str, str], lenient: Collection[str] = ()
) -> None:
    """Check that the first rows of the piece have the columns.

    Args:
        columns: setting → column.
        lenient: settings whose joined column (`title+text`) may lack some of its fields.

    Raises:
        ConfigError: one is not there; the message names the nearest that is.
    """
    if piece.kind == "text":  # opening a thousand of them tells nothing more
        seen: list[Mapping[str, Any]] = [dict.fromkeys(_OF_TEXTS, "")]
    else:
        rows = islice(read_rows(piece, columns.values()), _ROWS_TO_FIND_COLUMNS)
        seen = [row.values for row in rows if isinstance(row, Row)]
    for setting, column in columns.items():
        missing = _missing(seen, column)
        fields = column.rpartition(".")[2].split("+")
        if missing and (setting not in lenient or len(missing) == len(fields)):
            raise ConfigError(
                f"{setting} = {column!r}: {piece.path!r} has no such column; "
                f"{nearest(missing[0], _beside(piece, column))}{_hint(setting, seen)}"
            )


def first_pieces(pieces: Sequence[FilePiece]) -> list[FilePiece]:
    """The first piece of each file on this machine, of the first files where there are many; of
    files elsewhere, which answer slowly, of the first one.
    """
    firsts = list({piece.path: piece for piece in reversed(pieces)}.values())[::-1]
    return firsts[: 1 if "://" in firsts[0].path else _FILES_LOOKED_AT]


def _hint(setting: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What to set: the name of a column, or the sign that parts what looks like several."""
    names = list(rows[0]) if rows else []
    if len(names) == 1 and (signs := [sign for sign in ";\t|" if sign in names[0]]):
        at = f"{setting.rpartition('.')[0]}.delimiter"
        return f". Its first line has {signs[0]!r} between the names: set {at}={signs[0]!r}"
    return f". Set {setting} to the column that is meant" if setting.startswith("data.") else ""


def _missing(rows: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    """Names that `column` looks up and no row has."""
    looked_up = (level_of(row, column) for row in rows)
    absent = [[n for n in names if n not in level] for names, level in looked_up if names]
    return [name for name in absent[0] if all(name in names for names in absent)] if absent else []


def _beside(piece: FilePiece, column: str) -> dict[str, None]:
    """All names at the level where `column` ends."""
    rows = islice(read_rows(piece), _ROWS_TO_FIND_COLUMNS)
    levels = (level_of(row.values, column)[1] for row in rows if isinstance(row, Row))
    return {name: None for level in levels for name in level}


def _read_parquet(
    file: pyarrow.NativeFile, piece: FilePiece, columns: Collection[str] | None
) -> Iterator[Row | BadRow]:
    # The hub and object storage answer slowly: ranges are read together, ahead.
    reader = open_parquet(file, pre_buffer="://" in piece.path)
    groups = list(range(piece.start, reader.num_row_groups if piece.stop is None else piece.stop))
    chosen = None
    if columns is not None:
        names = reader.schema_arrow.names
        wanted = {name for column in columns for name in names_at_the_top(column)}
        wanted.update([piece.origins] if piece.origins else [])
        # Without any column Arrow would not tell how many rows there are.
        chosen = [name for name in names if name in wanted] or names[:1]
    number = piece.first_row
    for batch in reader.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=chosen):
        for values in _values_of(batch):
            here = f"{piece.name}#{number}"
            number += 1
            if isinstance(values, UnicodeDecodeError):
                yield BadRow(here, _NOT_UTF8, repr(values.object[:200]))
            else:
                yield Row(values[piece.origins] if piece.origins else here, values)


def _values_of(batch: pa.RecordBatch) -> Iterable[dict[str, Any] | UnicodeDecodeError]:
    """Rows of a batch, with an error in place of each row that is not UTF-8.

    Parquet texts are not validated by writers; Arrow checks them only here.
    """
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        return [_value_of(batch.slice(row, 1)) for row in range(len(batch))]


def _value_of(row: pa.RecordBatch) -> dict[str, Any] | UnicodeDecodeError:
    try:
        return dict(row.to_pylist()[0])
    except UnicodeDecodeError as error:
        return error


def names_at_the_top(column: str) -> set[str]:
    """Top-level columns needed to read the columns that settings name."""
    head = column.partition(".")[0]
    return {column, head, *head.split("+")}


def _read_jsonl(
    filesystem: pyarrow.fs.FileSystem, inside: str, piece: FilePiece
) -> Iterator[Row | BadRow]:
    for place, line in _lines(filesystem, inside, piece):
        origin = f"{piece.name}@{place}"
        try:
            values = json.loads(line.decode(piece.encoding) if piece.encoding else line)
        except RecursionError:
            yield BadRow(origin, "JSON too deeply nested", repr(line[:200]))
            continue
        except ValueError as error:
            reason = _NOT_UTF8 if isinstance(error, UnicodeDecodeError) else "not JSON"
            yield BadRow(origin, reason, repr(line[:200]))
            continue
        if isinstance(values, list):
            values = {str(number): value for number, value in enumerate(values)}
        if isinstance(values, dict):
            yield Row(origin, values)
        else:
            yield BadRow(origin, "neither a JSON object nor a list", repr(line[:200]))


def _lines(
    filesystem: pyarrow.fs.FileSystem, inside: str, piece: FilePiece
) -> Iterator[tuple[int, bytes]]:
    """Offset and content of the non-empty lines that start in the piece."""
    compressed = piece.name.endswith(".gz")
    with (
        filesystem.open_input_stream(inside)
        if compressed
        else filesystem.open_input_file(inside) as file
    ):
        # One byte back: a line that starts exactly at the border belongs to this piece.
        place = max(piece.start - 1, 0)
        if place:
            file.seek(place)
        reader = io.BufferedReader(file, 1 << 20)
        if piece.start:
            place += len(reader.readline())
        while piece.stop is None or place < piece.stop:
            line = reader.readline()
            if not line:
                return
            if line.strip():
                yield place, line
            place += len(line)


def _read_texts(piece: FilePiece, errors: tuple[type[Exception], ...]) -> Iterator[Row | BadRow]:
    for path, name in piece.texts:
        filesystem, inside = open_source(path)
        try:
            with filesystem.open_input_stream(inside) as stream:
                content = stream.read()
        except errors as error:  # the piece has a thousand others
            raise ArtifactError(f"cannot read the text {path!r}: {error}") from error
        try:
            text = content.decode(piece.encoding or "utf-8-sig")
        except UnicodeError:
            reason = f"not {piece.encoding}" if piece.encoding else _NOT_UTF8
            yield BadRow(name, reason, f"{name}: {content[:200]!r}")
            continue
        text, title = text.replace("\r\n", "\n"), ""
        if name.removesuffix(".gz").endswith(".md"):
            title, text = _without_front_matter(text)
        yield Row(name, {"id": name, "title": title, "text": text})


def _without_front_matter(text: str) -> tuple[str, str]:
    """Title in the YAML settings that some tools write above a text, empty without one, and the
    text; what only looks like settings is text.
    """
    found = _FRONT_MATTER.match(text)
    if found is None:
        return "", text
    try:
        settings = yaml.safe_load(found[1] or "{}")
    except (yaml.YAMLError, ValueError):
        return "", text
    if not isinstance(settings, dict):
        return "", text
    title = settings.get("title")
    return title.strip() if isinstance(title, str) else "", text[found.end() :]


def _read_csv(stream: pyarrow.NativeFile, piece: FilePiece) -> Iterator[Row | BadRow]:
    csv.field_size_limit(_LARGEST_CELL)
    # Bytes that are not UTF-8 come through as halves of surrogate pairs, so that they cost one row.
    text = io.TextIOWrapper(
        io.BufferedReader(stream),
        encoding=piece.encoding or "utf-8-sig",
        errors="strict" if piece.encoding else "surrogateescape",
        newline="",
    )
    form: dict[str, Any] = {}
    if piece.kind == "tsv":
        form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    if piece.delimiter is not None:
        form["delimiter"] = piece.delimiter
    reader = csv.DictReader(text, **form)
    if not all(map(is_unicode, reader.fieldnames or ())):
        raise csv.Error(
            "its first line is not UTF-8; set the source's encoding: latin-1 or cp1252 for files "
            "of older programs, utf-16 for Excel's Unicode text"
        )
    for number, values in enumerate(reader):
        origin = f"{piece.name}#{number}"
        if None in values:  # where the reader puts the cells beyond the last column
            yield BadRow(origin, "more cells than columns", str(values)[:200])
        elif not all(is_unicode(cell) for cell in values.values() if cell):
            yield BadRow(origin, _NOT_UTF8, str(values)[:200])
        else:
            yield Row(origin, values, json_lists=True)

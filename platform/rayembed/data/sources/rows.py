"""Read the rows of a piece, each with its origin, and check the columns that settings name.

file#row        Parquet, CSV, TSV: number of the row in the file, from 0
file@byte       JSONL: where its line starts, in the content that a .gz file holds
file            texts: the file's path below the folder
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.fs
import yaml

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source, reading_errors
from rayembed.config.settings import nearest
from rayembed.data.engine.parts import remedy
from rayembed.data.sources.cells import is_encodable, level_of, names_at_the_top
from rayembed.data.sources.csv_rows import NOT_UTF8, csv_rows
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.versions import is_unchanged
from rayembed.errors import ArtifactError, ConfigError, DataError

_ROWS_TO_FIND_COLUMNS = 1000
_ROWS_AT_ONCE = 1024
_FILES_LOOKED_AT = 64
_UTF8 = "utf-8-sig"
_OF_TEXTS = ("id", "title", "text")
"""Columns of text files."""

_ARRAY = re.compile(rb"\s*\[\s*(?:[\[{]|\Z)")
"""Start of a JSON array of rows, or of one of its lines."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escaped surrogate, alone or as half of a pair."""

_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?\n)??(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a source, with the place that it was read from."""

    origin: str
    values: Mapping[str, Any]
    json_lists: bool = False
    """Whether cells cannot hold lists, so that a text with a JSON list counts as one."""

    @property
    def shown(self) -> Mapping[str, Any]:
        """The row's values, as shown in messages."""
        return self.values


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read, with the reason."""

    origin: str
    reason: str
    shown: str


def read_rows(piece: FilePiece, columns: Collection[str] | None = None) -> Iterator[Row | BadRow]:
    """Yield the rows of a piece, in order.

    A line of JSONL that is a list has columns `0`, `1`, …; a file of a text has `id`, its path,
    `title`, which only the settings above it give, and `text`.

    Args:
        columns: those that will be read; of Parquet files no others are. None: all.

    Raises:
        ArtifactError: the file cannot be read, or not without guessing what its rows are.
        DataError: it is one JSON array; or it changed since it was listed, which is seen after its
            last row.
    """
    filesystem, inside = open_source(piece.path)
    errors: tuple[type[Exception], ...] = (UnicodeError, csv.Error)
    errors += reading_errors(piece.path)
    try:
        match piece.kind:
            case "jsonl":
                yield from _read_jsonl(filesystem, inside, piece, columns)
            case "csv" | "tsv":
                yield from _read_csv(filesystem, inside, piece)
            case "parquet":
                with filesystem.open_input_file(inside) as file:
                    yield from _read_parquet(file, piece, columns)
            case "text":
                yield from _read_texts(piece, errors)
        known = piece.states
        if known and not is_unchanged(piece.path, piece.texts, known, piece.version):
            of = "a file of the texts from" if piece.texts else "the file"
            raise DataError(
                f"rows {piece.path!r}: {of} {piece.name!r} changed after this job listed it, so "
                "its records would be stored under the fingerprint of the old content. Start the "
                "job again, and let nothing write to the file while the job runs"
            )
    except errors as error:
        advice = f". {remedy(piece.path)}" if piece.made else ""
        told = f"cannot read the rows {piece.path!r}: {error}{advice}"
        raise ArtifactError(told) from error


def lines_of(content: bytes) -> list[str]:
    r"""Split a text file into lines without their line ends, including empty lines.

    A line ends at `\n` or `\r\n`, in files without either at `\r`. Other signs that Unicode
    calls line breaks, such as U+2028, are part of a text. A byte-order mark is none.

    Raises:
        UnicodeError: not UTF-8; the message has the line.
    """
    try:
        text = content.decode(_UTF8)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        seen = content[error.start : error.start + 1]
        raise UnicodeError(
            f"line {line} is not UTF-8 ({seen!r}); convert the file to UTF-8"
        ) from None
    lines = text.split("\n") if "\n" in text else text.split("\r")
    return [line.removesuffix("\r") for line in lines]


def check_columns(
    piece: FilePiece,
    columns: Mapping[str, str],
    lenient: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Check that each column occurs in some row of the piece's file.

    Rows of JSONL have names of their own, so that a column may begin late: only where one is
    missing is the file read to its end.

    Args:
        columns: setting → column.
        lenient: settings whose joined column (`title+text`) may lack some of its fields.
        optional: settings that may be null, which messages advise.

    Raises:
        ConfigError: one is not there; the message names the nearest that is.
    """
    missing: dict[str, set[str]] = {}
    first: Mapping[str, Any] = {}
    for number, values in enumerate(_rows_to_check(piece, columns.values())):
        first = first or values
        for setting, column in columns.items():
            names, level = level_of(values, column)
            absent = {name for name in names if name not in level}
            if names:  # a row whose cell is empty does not tell
                missing[setting] = missing.get(setting, absent) & absent
        all_told = len(missing) == len(columns) or number >= _ROWS_TO_FIND_COLUMNS
        if all_told and not any(missing.values()):
            return
    for setting, column in columns.items():
        fields = column.rpartition(".")[2].split("+")
        absent = missing.get(setting, set())
        if absent and (setting not in lenient or len(absent) == len(fields)):
            name = min(absent, key=lambda one: fields.index(one) if one in fields else -1)
            hint = _hint(setting, first, optional=setting in optional)
            raise ConfigError(
                f"{setting} = {column!r}: {piece.path!r} has no such column; "
                f"{nearest(name, _beside(piece, column))}{hint}"
            )


def _rows_to_check(piece: FilePiece, columns: Collection[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows to look for columns in: all of JSONL, else the first thousand.

    Of files of texts, which opening does not tell apart, one row.
    """
    if piece.kind == "text":
        yield dict.fromkeys(_OF_TEXTS, "")
        return
    whole = replace(piece, stop=None) if piece.kind == "jsonl" else piece
    rows = (row.values for row in read_rows(whole, columns) if isinstance(row, Row))
    yield from rows if piece.kind == "jsonl" else islice(rows, _ROWS_TO_FIND_COLUMNS)


def first_pieces(pieces: Sequence[FilePiece]) -> list[FilePiece]:
    """First piece of each of the first local files, or of one remote file, which answers slowly."""
    firsts = list({piece.path: piece for piece in reversed(pieces)}.values())[::-1]
    return firsts[: 1 if "://" in firsts[0].path else _FILES_LOOKED_AT]


def _hint(setting: str, row: Mapping[str, Any], *, optional: bool) -> str:
    """Return advice about a missing column: which setting names it, or which delimiter the file
    seems to use.
    """
    names = list(row)
    if len(names) == 1 and (signs := [sign for sign in ";\t|" if sign in names[0]]):
        at = f"{setting.rpartition('.')[0]}.delimiter"
        return f". Its first line has {signs[0]!r} between the names: set {at}={signs[0]!r}"
    if not setting.startswith("data."):
        return ""
    without = f", or {setting}=null where rows have none" if optional else ""
    return f". Set {setting} to the column that is meant{without}"


def _beside(piece: FilePiece, column: str) -> dict[str, None]:
    """Names of all columns, or keys of the nested object, where `column` was looked for."""
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
                yield BadRow(here, NOT_UTF8, repr(values.object[:200]))
            else:
                yield Row(values[piece.origins] if piece.origins else here, values)


def _values_of(batch: pa.RecordBatch) -> list[dict[str, Any] | UnicodeDecodeError]:
    """Convert a batch to rows, with an error in place of each row that is not UTF-8.

    Parquet texts are not validated by writers; Arrow checks them only here.
    """
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [error]
        return [one for row in range(len(batch)) for one in _values_of(batch.slice(row, 1))]


def _read_jsonl(
    filesystem: pyarrow.fs.FileSystem,
    inside: str,
    piece: FilePiece,
    columns: Collection[str] | None,
) -> Iterator[Row | BadRow]:
    read = None if columns is None else {n for c in columns for n in names_at_the_top(c)}
    encoding = _encoding(piece)
    for place, line in _no_array(piece, _lines(filesystem, inside, piece)):
        origin = f"{piece.name}@{place}"
        try:
            values = _JSON.decode(_text_of(line, encoding))
        except _KeyTwiceError as error:
            yield BadRow(origin, f"key {error.args[0]!r} twice", repr(line[:200]))
            continue
        except RecursionError:
            yield BadRow(origin, "JSON too deeply nested", repr(line[:200]))
            continue
        except ValueError as error:
            reason = NOT_UTF8 if isinstance(error, UnicodeDecodeError) else "not JSON"
            yield BadRow(origin, reason, repr(line[:200]))
            continue
        if isinstance(values, list):
            values = {str(number): value for number, value in enumerate(values)}
        if not isinstance(values, dict):
            yield BadRow(origin, "neither a JSON object nor a list", repr(line[:200]))
        elif _SURROGATE.search(line) and not is_encodable(values, read):
            yield BadRow(origin, "not valid Unicode", repr(line[:200]))
        else:
            yield Row(origin, values)


def _no_array(piece: FilePiece, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines unchanged, but raise if they form one JSON array of rows.

    A row may be a list, also of lists or objects, but then it is whole and others follow.
    """
    begin = list(islice(lines, 2))
    if begin and not piece.start:
        line = begin[0][1].removeprefix(codecs.BOM_UTF8)
        if _ARRAY.match(line) and (len(begin) == 1 or not line.rstrip().endswith(b"]")):
            raise DataError(
                f"rows {piece.path!r}: the file is one JSON array, but must be JSONL with one row "
                "on each line (convert it with jq -c '.[]' file.json > file.jsonl)"
            )
    yield from begin
    yield from lines


class _KeyTwiceError(ValueError):
    """Raised if a JSON object has a key twice, since readers would keep only one value."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its pairs of key and value; raise if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwiceError(next(name for name in names if names.count(name) > 1))
    return values


_JSON = json.JSONDecoder(object_pairs_hook=_once)


def _text_of(line: bytes, encoding: str) -> str:
    if encoding == _UTF8:  # the codec of this name is slow
        return line.removeprefix(codecs.BOM_UTF8).decode()
    return line.decode(encoding)


def _lines(
    filesystem: pyarrow.fs.FileSystem, inside: str, piece: FilePiece
) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of the non-empty lines that start in the piece."""
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
            text = content.decode(_encoding(piece))
        except UnicodeError:
            reason = f"not {piece.encoding}" if piece.encoding else NOT_UTF8
            yield BadRow(name, reason, f"{name}: {content[:200]!r}")
            continue
        text, title = text.replace("\r\n", "\n"), ""
        if name.removesuffix(".gz").endswith(".md"):
            title, text = _without_front_matter(text)
        yield Row(name, {"id": name, "title": title, "text": text})


def _without_front_matter(text: str) -> tuple[str, str]:
    """Split a text into the title in its YAML front matter (empty without one) and its body."""
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


def _read_csv(
    filesystem: pyarrow.fs.FileSystem, inside: str, piece: FilePiece
) -> Iterator[Row | BadRow]:
    def opened() -> io.TextIOWrapper:
        # Bytes that are not UTF-8 come through as halves of surrogate pairs; they cost one row.
        encoding = _encoding(piece)
        return io.TextIOWrapper(
            io.BufferedReader(filesystem.open_input_stream(inside)),
            encoding=encoding,
            errors="surrogateescape" if encoding == _UTF8 else "strict",
            newline="",
        )

    sign, quotes = piece.delimiter, piece.quotes
    rows = csv_rows(opened, tsv=piece.kind == "tsv", delimiter=sign, quotes=quotes)
    for number, (values, reason) in enumerate(rows):
        origin = f"{piece.name}#{number}"
        if reason is not None:
            yield BadRow(origin, reason, str(values)[:200])
        else:
            yield Row(origin, values, json_lists=True)


def _encoding(piece: FilePiece) -> str:
    """Return the encoding of a piece; UTF-8 files may begin with a byte-order mark."""
    if piece.encoding is None or codecs.lookup(piece.encoding).name == "utf-8":
        return _UTF8
    return piece.encoding

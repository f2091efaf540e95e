"""The user's own pairs: JSONL, CSV or Parquet files, read piece by piece, rejected row by row.

A piece is what one task reads: a byte range of a JSONL file, a few row groups of a Parquet file,
a whole CSV or compressed file. Pieces depend on the files alone, not on the cluster.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import xxhash

from rayembed.assets.storage import is_remote, open_storage
from rayembed.config.data import DatasetConfig
from rayembed.config.settings import nearest
from rayembed.config.sources import PairsSource
from rayembed.data.records import Negative, Record, has_content, reject_reason
from rayembed.errors import ArtifactError, ConfigError, DataError

Kind = Literal["jsonl", "csv", "parquet"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_BYTES_PER_PIECE = 32 << 20
_ROWS_TO_FIND_COLUMNS = 1000
_LARGEST_CELL = 1 << 30


@dataclass(frozen=True)
class Piece:
    """What one task reads of a file."""

    path: str
    kind: Kind
    start: int = 0
    """First byte (a line belongs to the piece in which it starts) or first row group."""
    stop: int | None = None
    """Byte or row group after the last; None: to the end."""
    version: str = ""
    """Size and content hash (local) or time of change (object storage) of the file."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not even be read."""

    reason: str
    shown: str


def list_pieces(path: str) -> list[Piece]:
    """All pieces of a file, a folder or a prefix, files sorted by name.

    Hidden files and those that start with `_` are left out, as Spark and Ray do.

    Raises:
        DataError: nothing there, Parquet files without any rows, a file of an unknown kind, or a
            broken Parquet file.
    """
    filesystem, inside = open_storage(path)
    root = filesystem.get_file_info(inside)
    if root.type == pyarrow.fs.FileType.NotFound:
        raise DataError(f"there are no pairs at {path!r}: no such file, folder or prefix")
    if root.type == pyarrow.fs.FileType.File:
        files = [root]
    else:
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(inside, recursive=True))
        files = [f for f in found if f.is_file and not _hidden(f.path.removeprefix(inside))]
    if not files:
        raise DataError(f"there are no pairs at {path!r}: the folder holds no files")
    prefix = f"{path.partition('://')[0]}://" if is_remote(path) else ""
    query = path.partition("?")[2] if prefix else ""
    pieces = []
    for file in sorted(files, key=lambda file: str(file.path)):
        whole = f"{prefix}{file.path}" + (f"?{query}" if query else "")
        pieces += _pieces_of(filesystem, file, whole)
    if not pieces:
        raise DataError(f"the pairs at {path!r} are empty: no Parquet file there has any rows")
    return pieces


def read_rows(piece: Piece) -> Iterator[Mapping[str, Any] | BadRow]:
    """The rows of a piece as mappings from column to value.

    Raises:
        ArtifactError: the file cannot be read.
    """
    filesystem, inside = open_storage(piece.path)
    try:
        match piece.kind:
            case "jsonl":
                yield from _read_jsonl(filesystem, inside, piece)
            case "csv":
                with filesystem.open_input_stream(inside) as stream:
                    yield from _read_csv(stream)
            case "parquet":
                with filesystem.open_input_file(inside) as file:
                    reader = pq.ParquetFile(file)
                    for group in range(piece.start, piece.stop or reader.num_row_groups):
                        yield from reader.read_row_group(group).to_pylist()
    except (OSError, pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
        raise ArtifactError(f"cannot read the pairs {piece.path!r}: {error}") from error


def check_columns(piece: Piece, source: PairsSource) -> None:
    """Return when the columns that the source names exist, in the first rows of JSONL.

    Raises:
        ConfigError: one does not; the message names the nearest that does.
    """
    found: dict[str, None] = {}
    for number, row in enumerate(read_rows(piece)):
        if number == _ROWS_TO_FIND_COLUMNS:
            break
        if not isinstance(row, BadRow):
            found.update(dict.fromkeys(row))
    if not found:
        return
    for setting in ("query", "positive", "negatives", "label", "instruction"):
        column = getattr(source, setting)
        if column is not None and column not in found:
            raise ConfigError(
                f"source.{setting} = {column!r}: {piece.path!r} has no such column; "
                f"{nearest(column, found)}"
            )


def convert_row(row: Mapping[str, Any], dataset: DatasetConfig) -> Record | str:
    """The record of a row, or the reason why it gives none.

    Texts without a visible character, positives that equal the query, and negatives that equal the
    query or a positive are left out of the record. Rows with the same texts get the same id.
    """
    source = dataset.source
    assert isinstance(source, PairsSource)
    query = row.get(source.query)
    positives = _texts(row.get(source.positive))
    if positives is None:
        return f"column {source.positive!r} is neither a text nor a list of texts"
    reason = reject_reason({"query": query, "positives": positives})
    if reason or not isinstance(query, str):
        return reason or "no query"
    given = _texts(row.get(source.negatives)) if source.negatives else []
    if given is None:
        return f"column {source.negatives!r} is neither a text nor a list of texts"
    positives = [t for t in dict.fromkeys(positives) if t != query and has_content(t)]
    negatives = [
        t for t in dict.fromkeys(given) if t != query and t not in positives and has_content(t)
    ]
    label = row.get(source.label) if source.label else None
    instruction = row.get(source.instruction) if source.instruction else None
    if instruction is not None and not isinstance(instruction, str):
        return f"column {source.instruction!r} is not a text"
    named = None if label is None or label == "" else str(label)
    if not all(map(_is_unicode, (query, *positives, *negatives, instruction or "", named or ""))):
        return "not valid Unicode"
    identity = json.dumps([query, positives, negatives, instruction], ensure_ascii=False)
    return Record(
        id=f"{dataset.name}/{xxhash.xxh3_128_hexdigest(identity.encode())}",
        query=query,
        positives=tuple(positives),
        negatives=tuple(Negative(text) for text in negatives),
        dataset=dataset.name,
        task=dataset.task,
        query_instruction=instruction or dataset.query_instruction,
        document_instruction=dataset.document_instruction,
        in_batch=dataset.in_batch_negatives,
        label=named,
    )


def _is_unicode(text: str) -> bool:
    """Whether the text can be written; JSON lets half of a surrogate pair through."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> list[str] | None:
    """The texts in a cell; None where it is of another type.

    A cell of CSV that is a JSON list stands for its elements.
    """
    if value is None:
        return []
    if isinstance(value, str):
        if not value.startswith("["):
            return [value]
        try:
            parsed = json.loads(value)
        except ValueError:
            return [value]
        value = parsed if isinstance(parsed, list) and _all_texts(parsed) else [value]
    if not isinstance(value, list) or not _all_texts(value):
        return None
    return [text for text in value if text is not None]


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str | None) for value in values)


def _read_jsonl(
    filesystem: pyarrow.fs.FileSystem, inside: str, piece: Piece
) -> Iterator[Mapping[str, Any] | BadRow]:
    for line in _lines(filesystem, inside, piece):
        try:
            row = json.loads(line)
        except ValueError as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON"
            yield BadRow(reason, repr(line[:200]))
            continue
        if isinstance(row, dict):
            yield row
        else:
            yield BadRow("not a JSON object", repr(line[:200]))


def _lines(filesystem: pyarrow.fs.FileSystem, inside: str, piece: Piece) -> Iterator[bytes]:
    """The lines, without empty ones, that start in the piece."""
    if piece.path.partition("?")[0].endswith(".gz"):
        with filesystem.open_input_stream(inside) as stream:
            yield from (line for line in io.BufferedReader(stream) if line.strip())
        return
    with filesystem.open_input_file(inside) as file:
        # One byte back: a line that starts exactly at the border belongs to this piece.
        place = max(piece.start - 1, 0)
        file.seek(place)
        reader = io.BufferedReader(file, 1 << 20)
        if piece.start:
            place += len(reader.readline())
        while piece.stop is None or place < piece.stop:
            line = reader.readline()
            if not line:
                return
            place += len(line)
            if line.strip():
                yield line


def _read_csv(stream: Any) -> Iterator[Mapping[str, Any] | BadRow]:
    csv.field_size_limit(_LARGEST_CELL)
    text = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="")
    for row in csv.DictReader(text, restkey=""):
        if row.get(""):
            yield BadRow("more cells than columns", str(dict(row))[:200])
        else:
            yield row


def _pieces_of(
    filesystem: pyarrow.fs.FileSystem, file: pyarrow.fs.FileInfo, path: str
) -> list[Piece]:
    name = str(file.path)
    kind = next((k for end, k in _KINDS.items() if name.removesuffix(".gz").endswith(end)), None)
    if kind is None or (kind == "parquet" and name.endswith(".gz")):
        raise DataError(
            f"pairs {path!r}: the file's ending is not one of {', '.join(_KINDS)} "
            "(.gz after it for text files); rename it or take it out of the folder"
        )
    version = _version(filesystem, file, path)
    if kind == "parquet":
        try:
            with filesystem.open_input_file(name) as stream:
                metadata = pq.ParquetFile(stream).metadata
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"pairs {path!r} is no Parquet file: {error}") from None
        groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        if not groups:  # a writer that was closed before its first row
            return []
        starts = _starts(groups)
        stops = [*starts[1:], len(groups)]
        return [Piece(path, kind, a, b, version) for a, b in zip(starts, stops, strict=True)]
    if kind == "csv" or name.endswith(".gz"):
        return [Piece(path, kind, version=version)]
    edges = list(range(0, max(file.size, 1), _BYTES_PER_PIECE))
    ends: list[int | None] = [*edges[1:], None]
    return [Piece(path, kind, a, b, version) for a, b in zip(edges, ends, strict=True)]


def _starts(sizes: list[int]) -> list[int]:
    """First row group of each piece: groups in their order up to the size of a piece."""
    starts: list[int] = []
    filled = 0
    for group, size in enumerate(sizes):
        if not starts or filled + size > _BYTES_PER_PIECE:
            starts.append(group)
            filled = 0
        filled += size
    return starts


def _version(filesystem: pyarrow.fs.FileSystem, file: pyarrow.fs.FileInfo, path: str) -> str:
    if is_remote(path):  # reading hundreds of gigabytes twice would tell no more
        return f"{file.size}-{file.mtime_ns}"
    digest = xxhash.xxh3_128()
    with filesystem.open_input_stream(str(file.path), compression=None) as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return f"{file.size}-{digest.hexdigest()}"


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/") if part)

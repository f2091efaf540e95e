"""Find files of rows (Parquet, JSONL, CSV, TSV) or of texts, and divide them into pieces.

A piece is what one task reads: a byte range of a JSONL file, a few row groups of a Parquet file,
a whole CSV, TSV or compressed file, or several texts. Pieces depend on the files alone, not on
the cluster.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.fs
import xxhash

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.clients import split_options
from rayembed.assets.hub import parse_hub_reference
from rayembed.assets.reading import is_on_hub, list_hub_files, open_source, reading_errors
from rayembed.assets.resolver import is_unpacked, resolve
from rayembed.assets.storage import file_name, is_remote, join, open_storage
from rayembed.data.sources.names_beside import (
    NAMES_SHOWN,
    hidden,
    missing,
    of_patterns,
    shown_names,
)
from rayembed.data.sources.versions import (
    state_of,
    state_there,
    version_in,
    version_of_texts,
)
from rayembed.errors import DataError

Kind = Literal["jsonl", "csv", "tsv", "parquet", "text"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_TEXTS = (".txt", ".md")
"""File endings of text files, each one row of the kind `text`."""
_BYTES_PER_PIECE = 32 << 20
_OPENED_AT_ONCE = 16
_LEAST_BYTES = 32 << 10
"""Minimum size in bytes that a text counts for, since opening it takes as long; 1,024 are a piece.
"""


@dataclass(frozen=True)
class FilePiece:
    """Part of a file, or several text files, that one task reads."""

    path: str
    name: str
    """File name relative to the source's path; prefix of its rows' origins."""
    kind: Kind
    start: int = 0
    """First byte (a line belongs to the piece that it starts in) or first row group."""
    stop: int | None = None
    """Byte or row group after the last one; None means the end of the file."""
    first_row: int = 0
    """Number of rows of a Parquet file before the first row group."""
    size: int = 0
    """Size in bytes, uncompressed if the file records it."""
    version: str = ""
    """Version of the file: size and content hash (local), modification time (object storage) or
    blob (hub)."""
    delimiter: str | None = None
    """Delimiter of cells; None: the kind's own."""
    encoding: str | None = None
    """Encoding of texts; None: UTF-8."""
    quotes: str | None = None
    """Role of quotes in CSV and TSV; None: detected from the file."""
    origins: str | None = None
    """Column with the original source of each row; None if their position in the file is their
    origin."""
    made: bool = False
    """Whether a preparation step wrote the file, and can write it again; false for a user's file.
    """
    texts: tuple[tuple[str, str], ...] = ()
    """Path and name of each file of a piece of texts, of which `path` and `name` are the first."""
    states: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """State of each file when its version was computed, by `state_of`; empty: nothing is known that
    could change."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the piece's files."""
        return tuple(name for _, name in self.texts) or (self.name,)

    @property
    def key(self) -> str:
        """Hash of the piece's name, range and version, which identifies the work item wherever the
        file is.
        """
        told = [self.name, self.kind, self.start, self.stop, self.version]
        return xxhash.xxh3_128_hexdigest(repr(told).encode())


@dataclass(frozen=True)
class _File:
    path: str
    name: str
    size: int
    version: str
    """Version of the file; empty if it must be computed from the content."""
    state: str = ""
    """State of the file before its version was computed; empty: it cannot change, or has no
    version."""


def list_pieces(
    path: str,
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
    quotes: str | None = None,
    versions: bool = True,
    texts: bool = False,
) -> list[FilePiece]:
    """List all pieces of a file, folder, prefix or pattern (`*`, `**`), with files sorted
    by name.

    In folders, hidden files and those starting with `_` are skipped, as by Spark and Ray; on the
    hub also files of other kinds, such as the card.

    Args:
        delimiter: sign between cells of CSV and TSV files; None: the kind's own.
        encoding: of all but Parquet files; None: UTF-8.
        quotes: of CSV and TSV files; see `FileSource`.
        versions: whether pieces have the version of their file, for which local files are read
            whole.
        texts: whether files of texts (`.txt`, `.md`) are rows; not those of the hub.

    Raises:
        DataError: nothing there, not to be reached, Parquet files without any rows, a file of an
            unknown kind, texts among other files, or a broken Parquet file.
        AssetError: the hub does not give what the reference names.
    """
    try:
        if is_unpacked(path):
            files = _unpacked_files(path)
        else:
            files = _hub_files(path) if is_on_hub(path) else _stored_files(path)
        files.sort(key=lambda file: file.name)
        with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:  # opening a file waits for the network
            if texts and any(map(_is_text, files)):
                _check_all_texts(path, files)
                told = pool.map(partial(_with_version, versions=versions), files)
                pieces = _pieces_of_texts(list(told))
            else:
                found = pool.map(partial(_pieces_of, versions=versions), files)
                pieces = [piece for several in found for piece in several]
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the rows at {path!r} cannot be reached: {error}. Check the address, the network, and "
            "that this machine may read there"
        ) from error
    if not pieces:
        raise DataError(f"the rows at {path!r} are empty: no Parquet file there has any rows")
    lines = [piece.name for piece in pieces if piece.kind == "jsonl"]
    if encoding is not None and _newline(path, encoding) != b"\n" and lines:
        raise DataError(
            f"source.encoding={encoding}: JSONL files such as {lines[0]!r} are read in pieces, "
            f"which this encoding does not allow; convert the files: iconv -f {encoding} -t utf-8"
        )
    form: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "quotes": quotes}
    return [replace(piece, **form) for piece in pieces]


def _newline(path: str, encoding: str) -> bytes:
    try:
        return "\n".encode(encoding)
    except LookupError:
        raise DataError(
            f"rows {path!r}: Python knows no encoding {encoding!r}; name one such as latin-1, "
            "cp1252 or utf-16"
        ) from None


def _stored_files(path: str) -> list[_File]:
    """List the files at a path on local disk or in object storage."""
    base, pattern = _split_pattern(path)
    if pattern is not None and _info(path).type != pyarrow.fs.FileType.NotFound:
        base, pattern = path, None  # a name that has a star
    root = _info(base)
    filesystem, inside = open_storage(base)
    inside = inside.rstrip("/") or "/"
    if root.type == pyarrow.fs.FileType.NotFound:
        raise DataError(f"there are no rows at {path!r}: {missing(path)}")
    if root.type == pyarrow.fs.FileType.File:
        found = {root.base_name: root}
        names = [root.base_name]  # also of one that a folder would hide
    else:
        listed = filesystem.get_file_info(pyarrow.fs.FileSelector(inside, recursive=True))
        found = {f.path[len(inside) :].strip("/"): f for f in listed if f.is_file}
        names = _matching(path, list(found), pattern)
    remote = is_remote(path)
    prefix = f"{path.partition('://')[0]}://" if remote else ""
    options = split_options(path)[1] if prefix else ""
    files = [
        _File(
            f"{prefix}{found[name].path}{options}",
            name,
            found[name].size,
            # Reading hundreds of gigabytes twice would tell no more.
            state_there(found[name]) if remote else "",
            state_there(found[name]) if remote else "",
        )
        for name in names
    ]
    if not files:
        raise DataError(f"there are no rows at {path!r}: the folder holds no files")
    return files


def _info(path: str) -> pyarrow.fs.FileInfo:
    filesystem, inside = open_storage(path)
    return filesystem.get_file_info(inside.rstrip("/") or "/")


def _unpacked_files(path: str) -> list[_File]:
    """List the files of a reference that each machine unpacks into its own cache; their paths stay
    references.
    """
    here = str(resolve(path))
    files = _stored_files(here)
    names = {file: path if file.path == here else join(path, file.name) for file in files}
    return [replace(file, path=names[file]) for file in files]


def _hub_files(path: str) -> list[_File]:
    """List the files of a Hugging Face data set at one commit."""
    base, pattern = _split_pattern(path)
    found = list_hub_files(base)
    inside = parse_hub_reference(base).inside
    whole = {file.inside: file for file in found}
    if inside in whole:
        names = {file_name(inside): whole[inside]}
        matching = list(names)
    else:
        names = {name[len(inside) :].strip("/"): file for name, file in whole.items()}
        matching = _matching(path, list(names), pattern)
    known = [name for name in matching if _kind(name) is not None]
    if not known:
        others = sorted(name for name in matching if not hidden(name))
        shown = ", ".join(others[:NAMES_SHOWN]) or "none"
        hint = ""
        if any(name.endswith(".py") for name in others):
            hint = (
                ". It has a loading script, and no code of a data set is run; most have a Parquet "
                "copy: write @refs/convert/parquet in place of the revision"
            )
        raise DataError(
            f"there are no rows at {path!r}: none of its files ({shown}) ends with "
            f"{', '.join(_KINDS)}{hint}"
        )
    return [
        _File(names[name].path, name, names[name].size, names[name].version)
        for name in (known if pattern is None else matching)
    ]


def _split_pattern(path: str) -> tuple[str, str | None]:
    """Split a path into the folder above the first name with a `*`, and the pattern below that
    folder.
    """
    address, options = split_options(path) if "://" in path else (path, "")
    if "*" not in address:
        return path, None
    head, _, rest = address.partition("*")
    base, _, name = head.rpartition("/")
    return (base or "/" if head.startswith("/") else base or ".") + options, f"{name}*{rest}"


def _matching(path: str, names: Sequence[str], pattern: str | None) -> list[str]:
    visible = [name for name in names if not hidden(name)]
    if pattern is None:
        return visible
    parts = re.split(r"(\*\*/|\*+)", pattern)
    regex = "".join(
        {"**/": "(?:.*/)?", "*": "[^/]*"}.get(part, ".*")
        if part.startswith("*")
        else re.escape(part)
        for part in parts
    )
    matching = [name for name in visible if re.fullmatch(regex, name)]
    if not matching:
        shown = shown_names(sorted(visible))
        raise DataError(
            f"there are no rows at {path!r}: no file matches the pattern; the folder contains "
            f"{shown}{of_patterns(pattern)}"
        )
    return matching


def _kind(name: str) -> Kind | None:
    plain = name.removesuffix(".gz")
    kind = next((kind for ending, kind in _KINDS.items() if plain.endswith(ending)), None)
    return None if kind == "parquet" and plain != name else kind


def _is_text(file: _File) -> bool:
    return file.name.removesuffix(".gz").endswith(_TEXTS)


def _check_all_texts(path: str, files: Sequence[_File]) -> None:
    """Raise if a folder of text files contains files of other kinds, whose purpose is unclear."""
    other = next((file.name for file in files if not _is_text(file)), None)
    if other is not None:
        text = next(file.name for file in files if _is_text(file))
        ending = next(one for one in _TEXTS if text.removesuffix(".gz").endswith(one))
        pattern = "" if "*" in path else f": {path.rstrip('/')}/**/*{ending}"
        raise DataError(
            f"rows {path!r}: the folder mixes text files such as {text!r}, each of which is one "
            f"row, with other files such as {other!r}; select the files to read with a "
            f"pattern{pattern}"
        )


def _pieces_of_texts(files: Sequence[_File]) -> list[FilePiece]:
    """Divide text files into pieces of consecutive files; each file is one row."""
    sizes = [max(file.size, _LEAST_BYTES) for file in files]
    starts = _starts(sizes)
    pieces = []
    for start, stop in zip(starts, [*starts[1:], len(files)], strict=True):
        several, first = files[start:stop], files[start]
        pieces.append(
            FilePiece(
                first.path,
                first.name,
                "text",
                size=sum(file.size for file in several),
                version=version_of_texts([(file.name, file.version) for file in several]),
                texts=tuple((file.path, file.name) for file in several),
                states=_states(several),
            )
        )
    return pieces


def _states(files: Sequence[_File]) -> tuple[str, ...]:
    return tuple(file.state for file in files) if all(file.state for file in files) else ()


def _with_version(file: _File, *, versions: bool) -> _File:
    """Add the file's version; leave it empty if it is unknown and `versions` is false."""
    if file.version or not versions:
        return file
    state = "" if is_unpacked(file.path) else state_of(file.path)
    return replace(file, version=version_in(file.path, state), state=state)


def _pieces_of(file: _File, *, versions: bool) -> list[FilePiece]:
    kind = _kind(file.name)
    if kind is None:
        raise DataError(
            f"rows {file.path!r}: the file's ending is not one of {', '.join(_KINDS)} (each but "
            "the last may be followed by .gz); rename the file or remove it from the folder"
        )
    filesystem, inside = open_source(file.path)
    file = _with_version(file, versions=versions)
    states = _states([file])
    piece = partial(FilePiece, file.path, file.name, kind, version=file.version, states=states)
    if kind == "parquet":
        try:
            with filesystem.open_input_file(inside) as stream:
                metadata = open_parquet(stream).metadata
        except reading_errors(file.path) as error:
            raise DataError(f"rows {file.path!r}: cannot be read as Parquet: {error}") from None
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        if not groups:  # a writer that was closed before its first row
            return []
        sizes = [group.total_byte_size for group in groups]
        starts = _starts(sizes)
        stops = [*starts[1:], len(groups)]
        rows = [sum(group.num_rows for group in groups[:start]) for start in starts]
        return [
            piece(a, b, first_row=row, size=sum(sizes[a:b]))
            for a, b, row in zip(starts, stops, rows, strict=True)
        ]
    if kind != "jsonl" or file.name.endswith(".gz"):
        return [piece(size=file.size)]
    edges = list(range(0, max(file.size, 1), _BYTES_PER_PIECE))
    ends: list[int | None] = [*edges[1:], None]
    return [piece(a, b, size=(b or file.size) - a) for a, b in zip(edges, ends, strict=True)]


def _starts(sizes: list[int]) -> list[int]:
    """Group consecutive sizes up to the piece size; return the index at which each piece starts."""
    starts: list[int] = []
    filled = 0
    for group, size in enumerate(sizes):
        if not starts or filled + size > _BYTES_PER_PIECE:
            starts.append(group)
            filled = 0
        filled += size
    return starts

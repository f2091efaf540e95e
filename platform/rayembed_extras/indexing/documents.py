"""Read documents from files of rows or texts: ids, pieces, hashes and metadata, and the rows that
cannot be used.

    working/documents/<piece>-<number>.parquet   rows of `ROWS` and the metadata columns
                      units/                     results of the tasks

A row is a piece of a document. Memory is bounded by `_BYTES_PER_FILE`, whatever a piece of the
files holds.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from typing import Any

import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.types import has_content
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import text_hash
from rayembed.data.sources.cells import RowError, name_in, read_column, text_in
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.rows import BadRow, Row, check_columns, read_rows
from rayembed.errors import ConfigError, DataError
from rayembed_extras.indexing.chunks import Split, splitter
from rayembed_extras.indexing.rows import NO_METADATA, ROWS, DocumentColumns, metadata_types
from rayembed_extras.indexing.settings import NO_LIMITS, Chunks, Documents, RowLimits
from rayembed_extras.indexing.store import RESERVED

CODE_VERSION = 2
"""Code version of reading documents; raise it when the same files yield other rows."""

_NAMES = ("id", "_id")
_DOCUMENTS_AT_ONCE = 1024
_BYTES_PER_FILE = 8 << 20
_EXAMPLES = 3
_SHOWN_CHARACTERS = 300
_LARGEST = 2**63
_NUMBER_BYTES = 8
"""Bytes kept free in the id of a document for the number of a piece."""

_TYPES: Mapping[type, str] = {str: "string", bool: "bool", int: "int64", float: "double"}


def document_pieces(documents: Documents, *, versions: bool = True) -> list[FilePiece]:
    """List the pieces of the files; of a folder in BEIR's layout those of its corpus.

    Args:
        versions: whether pieces have the version of their file, for which local files are read.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
    """
    path = documents.path
    scheme = path.partition("://")[0] if "://" in path else ""
    if "*" not in path and scheme in ("", "s3", "gs"):
        corpus, queries = (join(path, f"{name}.jsonl") for name in ("corpus", "queries"))
        if exists(corpus) and exists(queries):
            path = corpus
    return list_pieces(
        path,
        delimiter=documents.delimiter,
        encoding=documents.encoding,
        versions=versions,
        texts=True,
    )


def settled_columns(documents: Documents, pieces: Sequence[FilePiece]) -> DocumentColumns:
    """Choose the column of the id, and check that the named columns exist.

    Raises:
        ConfigError: one does not, or a metadata column has a name that the store uses itself.
    """
    named = {"documents.text": documents.text}
    if documents.id is not None:
        named["documents.id"] = documents.id
    metadata: dict[str, str] = {}
    for place, column in enumerate(documents.metadata):
        name = column.replace(".", "_").replace("+", "_")
        if name in RESERVED or name in metadata:
            why = "the store has a column of that name" if name in RESERVED else "given twice"
            raise ConfigError(
                f"documents.metadata: the column {column!r} would be stored as {name!r}: {why}; "
                "rename it in the files, or leave it out"
            )
        metadata[name] = column
        named[f"documents.metadata.{place}"] = column
    check_columns(pieces[0], named, lenient=("documents.text",))
    own = documents.id
    if own is None:
        first = next((row for row in read_rows(pieces[0]) if isinstance(row, Row)), None)
        own = next((name for name in _NAMES if first is not None and name in first.values), None)
    return DocumentColumns(own, documents.text, metadata)


@dataclass(frozen=True)
class IndexPiece:
    """Work item: a piece of the files."""

    piece: FilePiece

    @property
    def key(self) -> str:
        """Hash of the piece's name, range and version."""
        return self.piece.key


@dataclass(frozen=True)
class ReadIndexDocuments:
    """Task: write the documents of a piece as rows of pieces of texts."""

    folder: str
    columns: DocumentColumns
    chunks: Chunks
    model: "TokenizerPlace | None"
    """Where the model's tokenizer is; None for whole documents."""
    limits: RowLimits = NO_LIMITS
    """Of the store."""
    store_text: bool = True

    def __call__(self, item: IndexPiece) -> Result:
        """Write the rows; return counts, rejected rows with examples, the types of metadata with
        the first row of each, the names and rows of the written files, the bytes of these, and
        those of their rows in memory.
        """
        split = splitter(self.chunks, None if self.model is None else self.model.load())
        collected = _Collected(self, item.key, split)
        for row in read_rows(item.piece, self.columns.read):
            collected.add(row)
        collected.flush()
        collected.write()
        return {
            "rows_in": collected.rows_in,
            "rows_used": collected.documents,
            "rows_out": collected.rows_out,
            "rejected": dict(collected.rejected),
            "examples": collected.examples,
            "types": collected.types,
            "files": collected.files,
            "file_bytes": collected.file_bytes,
            "row_bytes": collected.row_bytes,
        }


class _Collected:
    """Rows of a piece of the files that are not written yet, and counts of all."""

    def __init__(self, task: ReadIndexDocuments, key: str, split: Split) -> None:
        self._task, self._key, self._split = task, key, split
        self.rows_in = self.documents = self.rows_out = 0
        self.file_bytes = self.row_bytes = 0
        self.rejected: Counter[str] = Counter()
        self.examples: list[dict[str, str]] = []
        self.types: dict[str, dict[str, str]] = {name: {} for name in task.columns.metadata}
        self.files: list[list[Any]] = []
        self._documents: list[tuple[str, str, str, list[Any]]] = []
        self._tables: list[pa.Table] = []
        self._bytes = 0

    def add(self, row: Row | BadRow) -> None:
        """Take a row of the files."""
        self.rows_in += 1
        if isinstance(row, BadRow):
            self._reject(row, row.reason)
            return
        columns = self._task.columns
        try:
            text = text_in(row.values, columns.text)
            if text is None or not has_content(text):
                raise RowError("no text")
            if "\0" in text:  # PostgreSQL keeps none
                raise RowError("a text with a NUL character")
            name = None if columns.id is None else name_in(row.values, columns.id)
            if columns.id is not None and name is None:
                raise RowError("no id")
            if name is not None and "\0" in name:
                raise RowError("an id with a NUL character")
            found = [self._metadata(n, c, row) for n, c in columns.metadata.items()]
            self._check_size(name, text, found)
        except RowError as error:
            self._reject(row, str(error))
            return
        if name is None:
            name = xxhash.xxh3_128_hexdigest(text.encode())
        self.documents += 1
        self._documents.append((name, text, row.origin, found))
        if len(self._documents) >= _DOCUMENTS_AT_ONCE:
            self.flush()

    def _metadata(self, name: str, column: str, row: Row) -> Any:
        value = read_column(row.values, column)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        kind = _TYPES.get(type(value)) or _type_of(value)
        if kind is None:
            raise DataError(
                f"documents.metadata: the column {column!r} holds {repr(value)[:80]} "
                f"({type(value).__name__}) in {row.origin}; metadata are texts, numbers, true or "
                "false, dates or lists of texts. Of an object name a field, such as "
                f"{column}.name, or leave the column out"
            )
        if kind == "int64" and not -_LARGEST <= value < _LARGEST:
            raise RowError(f"a number in {column!r} beyond 64 bits")
        if kind in ("string", "list of texts") and "\0" in "".join(value):
            raise RowError(f"a text in {column!r} with a NUL character")
        if kind not in self.types[name]:
            self.types[name][kind] = row.origin
            metadata_types(self._task.columns, [{"types": self.types}])
        return value

    def _check_size(self, name: str | None, text: str, metadata: Sequence[Any]) -> None:
        """Raise RowError if the store has no room for a row of this document."""
        limits, whole = self._task.limits, self._task.chunks.by == "document"
        longest = None if limits.id is None else limits.id - (0 if whole else _NUMBER_BYTES)
        if name is not None and longest is not None and len(name.encode()) > longest:
            raise RowError(f"an id above {longest:,} bytes, the most that the store takes")
        if limits.texts is None:
            return
        texts = [
            one for value in metadata for one in (value if isinstance(value, list) else [value])
        ]
        if whole and self._task.store_text:
            texts.append(text)
        if sum(len(one.encode()) for one in texts if isinstance(one, str)) > limits.texts:
            raise RowError(
                f"text and metadata above {limits.texts:,} bytes, the most that the store takes"
            )

    def _reject(self, row: Row | BadRow, reason: str) -> None:
        self.rejected[reason] += 1
        if self.rejected[reason] <= _EXAMPLES:
            shown = row.shown if isinstance(row, BadRow) else str(row.values)
            told = f"{row.origin}: {shown}"[:_SHOWN_CHARACTERS]
            self.examples.append({"reason": reason, "row": told})

    def flush(self) -> None:
        """Divide the waiting documents into pieces, and keep them as a table."""
        if not self._documents:
            return
        waiting, self._documents = self._documents, []
        divided = self._split([text for _, text, _, _ in waiting])
        own = self._task.chunks.by != "document"
        numbers = [n for pieces in divided for n in range(len(pieces))]
        whole = [one for one, pieces in zip(waiting, divided, strict=True) for _ in pieces]
        texts = [piece for pieces in divided for piece in pieces]
        documents = [one[0] for one in whole]
        ids = [f"{d}#{n}" for d, n in zip(documents, numbers, strict=True)] if own else documents
        columns: dict[str, Any] = {
            "id": ids,
            "document": documents,
            "chunk": numbers,
            "text": texts,
            "text_hash": [text_hash(text) for text in texts],
            "metadata_hash": [NO_METADATA] * len(ids),
            "origin": [one[2] for one in whole],
        }
        table = pa.table(columns, ROWS)
        for place, name in enumerate(self._task.columns.metadata):
            table = table.append_column(name, _column([one[3][place] for one in whole]))
        self._tables.append(table)
        self._bytes += table.nbytes
        self.row_bytes += table.nbytes
        if self._bytes >= _BYTES_PER_FILE:
            self.write()

    def write(self) -> None:
        """Write the waiting tables as one file."""
        if not self._tables:
            return
        table = pa.concat_tables(self._tables, promote_options="permissive")
        self._tables, self._bytes = [], 0
        name = f"{self._key}-{len(self.files):04d}.parquet"
        content = parquet_bytes(table, statistics=False)
        write_atomic(join(self._task.folder, name), content)
        self.files.append([name, len(table)])
        self.file_bytes += len(content)
        self.rows_out += len(table)


def _type_of(value: Any) -> str | None:
    """Name of the type of a value that is no text or plain number; None: it is none for
    metadata.
    """
    if isinstance(value, datetime):
        return "timestamp" if value.tzinfo is None else "timestamp with zone"
    if isinstance(value, date):
        return "date"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "list of texts"
    return next((name for kind, name in _TYPES.items() if isinstance(value, kind)), None)


def _column(values: list[Any]) -> pa.Array:
    """Make a column of values of one type, or of integers and floats."""
    zoned = any(isinstance(value, datetime) and value.tzinfo is not None for value in values)
    return pa.array(values, pa.timestamp("us", tz="UTC") if zoned else None)


@dataclass(frozen=True)
class TokenizerPlace:
    """Model folder whose tokenizer divides documents; each process loads it once."""

    reference: str
    weights: str
    tracking_uri: str | None

    def load(self) -> Any:
        """Load the tokenizer.

        Raises:
            ArtifactError: the model here has other weights than where the job began.
        """
        return _tokenizer(self)


@lru_cache(maxsize=1)
def _tokenizer(place: TokenizerPlace) -> Any:
    from rayembed.models.loading.load import tokenizer_of
    from rayembed_extras.indexing.embed import model_folder

    return tokenizer_of(model_folder(place.reference, place.weights, place.tracking_uri))


def kept_settings(documents: Documents, columns: DocumentColumns) -> dict[str, Any]:
    """Settings that decide a table's rows: not where the files are, nor their form."""
    settled = replace_id(documents, columns.id)
    left_out = {"path", "delimiter", "encoding", "max_rejected_share", "max_deleted_share"}
    return settled.model_dump(mode="json", exclude={*left_out, "metadata_types"})


def stated_types(documents: Documents, columns: DocumentColumns) -> dict[str, str]:
    """Types of metadata columns that the settings state, by their stored names."""
    stated = documents.metadata_types
    return {name: stated[own] for name, own in columns.metadata.items() if own in stated}


def recorded_settings(documents: Documents, columns: DocumentColumns) -> dict[str, Any]:
    """Settings of a table's record: those of `kept_settings`, and the ones that an upgrade needs to
    read the files of the last job again.
    """
    settled = replace_id(documents, columns.id)
    return settled.model_dump(mode="json", exclude={"path", "max_deleted_share"})


def replace_id(documents: Documents, column: str | None) -> Documents:
    """Copy the settings with the column of the id that was chosen."""
    return documents.model_copy(update={"id": column})

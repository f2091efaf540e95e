"""Read a separate corpus to mine from: document files become parts, which a teacher then
embeds.

Parts of documents are Parquet files of one column, `text`, named by their content.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import below, file_name, join, write_atomic
from rayembed.config import mining as settings
from rayembed.config.document import fingerprint
from rayembed.config.sources import DEFAULT_REJECTED_SHARE
from rayembed.config.types import has_content
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import Part
from rayembed.data.engine.work_items import Result, add_up, run_resumable
from rayembed.data.hashes import text_hash
from rayembed.data.sources.cells import read_column
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.rows import BadRow, Row, check_columns, read_rows
from rayembed.data.sources.tasks import HELD_OUT_TEXT, HeldOut
from rayembed.data.words import normalised_hash
from rayembed.errors import DataError

CODE_VERSION = 1
"""Code version of reading documents; raise it when the same files yield others."""

SCHEMA = pa.schema([("text", pa.string())])

_DOCUMENTS_PER_PART = 16_384
"""Documents in a part; vectors of 4,096 dimensions then take 134 MB."""

_DUPLICATE = "duplicate"
_EXAMPLES_PER_UNIT = 3
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class DocumentPiece:
    """Work item: a piece of the document files."""

    piece: FilePiece

    @property
    def key(self) -> str:
        """Hash of the file and its byte range, which identifies the work item."""
        return xxhash.xxh3_128_hexdigest(repr(self.piece).encode())


@dataclass(frozen=True)
class ReadDocuments:
    """Task: write the documents of a piece as parts, without duplicates and held-out texts."""

    folder: str
    column: str
    held_out: HeldOut

    def __call__(self, item: DocumentPiece) -> Result:
        """Write the documents; return `parts`, counts and examples of rejected rows. A row may hold
        several documents.
        """
        waiting: dict[str, None] = {}
        seen: set[int] = set()
        parts: list[Part] = []
        rejected: dict[str, int] = {}
        examples: list[dict[str, str]] = []
        rows = 0
        for row in read_rows(item.piece, (self.column,)):
            rows += 1
            texts = documents_of(row, self.column)
            if not isinstance(texts, str):
                texts = self._not_held_out(row, texts) or HELD_OUT_TEXT
            if not isinstance(texts, str):
                new = [text for text in dict.fromkeys(texts) if text_hash(text) not in seen]
                seen.update(map(text_hash, new))
                waiting.update(dict.fromkeys(new))
                texts = "" if new else _DUPLICATE
            if texts:
                rejected[texts] = rejected.get(texts, 0) + 1
                if sum(one["reason"] == texts for one in examples) < _EXAMPLES_PER_UNIT:
                    examples.append({"reason": texts, "row": _shown(row)})
            if len(waiting) >= _DOCUMENTS_PER_PART:
                parts.append(write_documents(self.folder, list(waiting)))
                waiting = {}
        if waiting:
            parts.append(write_documents(self.folder, list(waiting)))
        return {
            "rows_in": rows,
            "rows_used": rows - sum(rejected.values()),
            "rows_out": sum(part.rows for part in parts),
            "rejected": rejected,
            "examples": examples,
            "parts": [[part.name, part.rows] for part in parts],
        }

    def _not_held_out(self, row: Row | BadRow, texts: Sequence[str]) -> list[str]:
        """Drop the held-out documents of a row; drop all if one of the texts that `column` joins is
        held out.
        """
        held = self.held_out.texts
        level, dot, names = self.column.rpartition(".")
        for name in names.split("+") if held and "+" in names else ():
            single = documents_of(row, f"{level}{dot}{name}")
            if not isinstance(single, str) and any(normalised_hash(t) in held for t in single):
                return []
        return [text for text in texts if not held or normalised_hash(text) not in held]


def corpus_of(
    context: PipelineContext, corpus: settings.Corpus, held_out: HeldOut
) -> tuple[ArtifactWriter, list[FilePiece]]:
    """Return the writer of the corpus's folder, which may not exist yet, and the pieces of its
    document files.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
    """
    pieces = list_pieces(below(context.root, corpus.path))
    named = [[file_name(p.path), p.start, p.version] for p in pieces]
    inputs = {
        "code": CODE_VERSION,
        "text": corpus.text,
        "source": fingerprint(named),
        "held_out": fingerprint(sorted(map(str, held_out.texts))),
    }
    return ArtifactWriter(context.storage, "documents", "corpus", inputs), pieces


def make_documents(
    context: PipelineContext,
    corpus: settings.Corpus,
    writer: ArtifactWriter,
    pieces: Sequence[FilePiece],
    held_out: HeldOut,
) -> DatasetArtifact:
    """Make or reuse the folder with the corpus's documents.

    Raises:
        DataError: no documents, or too many rows without one.
    """
    if (found := writer.existing()) is not None:
        return found
    task = ReadDocuments(writer.parts_folder, corpus.text, held_out)
    items = [DocumentPiece(piece) for piece in pieces]
    results = run_resumable(writer.folder, "documents", task, items, context.execute)
    _accept(corpus, results)
    return writer.finish(results, [part for result in results for part in result["parts"]])


def documents_of(row: Row | BadRow, column: str) -> list[str] | str:
    """Return the documents in a row, or the reason why the row has none."""
    if isinstance(row, BadRow):
        return row.reason
    value = read_column(row.values, column)
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str | None) for text in texts):
        return f"column {column!r} is neither a text nor a list of texts"
    found = [text for text in texts if text is not None and has_content(text)]
    return found or "no text"


def documents_in(path: str, column: str) -> Iterator[str]:
    """Yield all texts of one column of Parquet, JSONL or CSV files, in their order.

    Raises:
        ConfigError: no such column; at once.
        DataError: nothing there, at once; later a row without a text there.
    """
    pieces = list_pieces(path)
    check_columns(pieces[0], {"--column": column})

    def texts() -> Iterator[str]:
        rows = itertools.chain.from_iterable(read_rows(piece, (column,)) for piece in pieces)
        for row in rows:
            found = documents_of(row, column)
            if isinstance(found, str):
                if found == "no text":
                    continue  # an empty document stands for nothing
                raise DataError(f"{row.origin}: {found}; correct the row or leave it out")
            yield from found

    return texts()


def _shown(row: Row | BadRow) -> str:
    told = row.shown if isinstance(row, BadRow) else str(row.values)
    return f"{row.origin}: {told}"[:_SHOWN_CHARACTERS]


def write_documents(folder: str, texts: Sequence[str]) -> Part:
    """Write texts as a Parquet file named by its content below `folder`; writing again has no
    effect.
    """
    content = parquet_bytes(pa.table({"text": list(texts)}, SCHEMA))
    path = join(folder, f"part-{xxhash.xxh3_128_hexdigest(content)}.parquet")
    write_atomic(path, content)
    return Part(path, len(texts))


def _accept(corpus: settings.Corpus, results: Sequence[Result]) -> None:
    """Raise if the corpus has no documents, or too many rows without a document."""
    rows, documents, rejected = add_up(results)
    counts = ", ".join(f"{count} × {reason}" for reason, count in rejected.items())
    good = (_DUPLICATE, HELD_OUT_TEXT)
    bad = sum(count for reason, count in rejected.items() if reason not in good)
    if not documents:
        raise DataError(f"the corpus {corpus.path!r} has no documents in its {rows} rows: {counts}")
    if bad > DEFAULT_REJECTED_SHARE * rows:
        raise DataError(
            f"the corpus {corpus.path!r}: {bad} of {rows} rows have no document in column "
            f"{corpus.text!r} ({counts}), more than the allowed share {DEFAULT_REJECTED_SHARE}; "
            "correct the files or name another column (mining.corpus.text)"
        )

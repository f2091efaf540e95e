"""Locate the texts of a corpus and read each text with its language or a rejection reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayembed.assets.storage import below
from rayembed.config.document import fingerprint
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.rows import BadRow, check_columns, read_rows
from rayembed_extras.adaptation.settings import TextsConfig

NO_TEXT = "no text"
NO_LANGUAGE = "no language"

_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Text:
    """A usable text with its language."""

    text: str
    language: str


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row without a usable text, with the reason."""

    reason: str
    shown: str


@dataclass(frozen=True)
class FoundTexts:
    """A set of texts whose files exist and have the columns that the settings name."""

    texts: TextsConfig
    """Settings with the path resolved below the root."""
    content: str
    """Content fingerprint of the files."""
    items: tuple[FilePiece, ...]


def find_texts(texts: TextsConfig, root: str) -> FoundTexts:
    """Locate the files of a set of texts before any row is read.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
        ConfigError: a column that the files do not have.
        AssetError: the hub does not give what the path names.
    """
    source = texts.source.model_copy(update={"path": below(root, texts.source.path)})
    texts = texts.model_copy(update={"source": source})
    pieces = tuple(
        list_pieces(
            source.path,
            delimiter=source.delimiter,
            encoding=source.encoding,
            quotes=source.quotes,
        )
    )
    columns = {"source.text": source.text}
    if source.language is not None:
        columns["source.language"] = source.language
    check_columns(pieces[0], columns)
    versions = [[piece.name, piece.start, piece.version] for piece in pieces]
    return FoundTexts(texts, fingerprint(versions), pieces)


def read_texts(texts: TextsConfig, item: FilePiece) -> Iterator[Text | RejectedRow]:
    """Yield the texts and rejected rows of a work item, in order.

    Raises:
        ArtifactError: the file cannot be read.
    """
    source = texts.source
    columns = [source.text] + ([source.language] if source.language else [])
    for row in read_rows(item, columns):
        if isinstance(row, BadRow):
            yield RejectedRow(row.reason, row.shown)
            continue
        try:
            yield _text(texts, row.values)
        except RowError as error:
            yield RejectedRow(str(error), repr(dict(row.values))[:_SHOWN_CHARACTERS])


def _text(texts: TextsConfig, values: Mapping[str, Any]) -> Text:
    source = texts.source
    text = text_in(values, source.text)
    if text is None or not text.strip():
        raise RowError(NO_TEXT)
    language = texts.language if source.language is None else name_in(values, source.language)
    if language is None:
        raise RowError(NO_LANGUAGE)
    return Text(text, language)

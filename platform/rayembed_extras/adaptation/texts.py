"""Reading of a corpus: locations, and each text with its language or a rejection reason."""

from collections.abc import Iterator
from dataclasses import dataclass

from rayembed.assets.storage import below
from rayembed.config.document import fingerprint
from rayembed.data.sources.cells import RowError, is_unicode, name_in, text_in
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.rows import BadRow, check_columns, read_rows
from rayembed_extras.adaptation.settings import TextsConfig

NO_TEXT = "no text"
NO_LANGUAGE = "no language"
NOT_UNICODE = "not Unicode"

_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Text:
    """A usable text."""

    text: str
    language: str


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be used."""

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
    told = [[piece.name, piece.start, piece.version] for piece in pieces]
    return FoundTexts(texts, fingerprint(told), pieces)


def read_texts(texts: TextsConfig, item: FilePiece) -> Iterator[Text | RejectedRow]:
    """Texts of a work item, in order.

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
            text = text_in(row.values, source.text)
            language = texts.language
            if source.language is not None:
                language = name_in(row.values, source.language)
        except RowError as error:
            yield RejectedRow(str(error), repr(dict(row.values))[:_SHOWN_CHARACTERS])
            continue
        yield _checked(text, language)


def _checked(text: str | None, language: str | None) -> Text | RejectedRow:
    if text is None or not text.strip():
        return RejectedRow(NO_TEXT, repr(text)[:_SHOWN_CHARACTERS])
    if not is_unicode(text):
        return RejectedRow(NOT_UNICODE, repr(text)[:_SHOWN_CHARACTERS])
    if language is None:
        return RejectedRow(NO_LANGUAGE, repr(text)[:_SHOWN_CHARACTERS])
    return Text(text, language)

"""Estimate an index job from a sample of its documents: texts, tokens, time, bytes, price."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TextIO

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.reading import open_source
from rayembed.config.types import has_content
from rayembed.data.sources.cells import RowError, text_in
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import Row, first_pieces, read_rows
from rayembed.display.progress import duration
from rayembed.display.tables import console, facts_table
from rayembed.errors import DataError
from rayembed.machine.hardware import default_device, settled
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import saved_widths, tokenizer_of
from rayembed.registry.registered_model import find_folder, pinned_reference
from rayembed.results.costs import Cost
from rayembed_extras.indexing.checks import settled_run, tracking_uri_of
from rayembed_extras.indexing.chunks import check_size, splitter
from rayembed_extras.indexing.documents import document_pieces, settled_columns
from rayembed_extras.indexing.embed import IndexModelSpec, LoadedModel
from rayembed_extras.indexing.places import place_of
from rayembed_extras.indexing.report import shown_reference
from rayembed_extras.indexing.rows import DocumentColumns
from rayembed_extras.indexing.settings import IndexRun
from rayembed_extras.indexing.store import VECTOR, Layout

_DOCUMENTS = 1000
"""Documents of the sample."""

_TEXTS = 256
"""Texts that are embedded to measure the speed."""

_ZIPPED = 4
"""Bytes of a text file that a byte of its `.gz` file stands for; assumed."""


@dataclass(frozen=True)
class DocumentSample:
    """Documents from the first files, divided into texts."""

    documents: int
    texts: tuple[str, ...]
    tokens: int
    """Tokens of all texts, as the model reads them."""
    share: float
    """Share of all documents."""

    @property
    def in_all(self) -> tuple[int, int, int]:
        """Documents, texts and tokens of the whole corpus, extrapolated."""
        numbers = (self.documents, len(self.texts), self.tokens)
        documents, texts, tokens = (round(number / self.share) for number in numbers)
        return documents, texts, tokens


@dataclass(frozen=True)
class IndexEstimate:
    """What an index job will take."""

    run: IndexRun
    sample: DocumentSample
    dimensions: int
    texts_per_second: float
    measured: str
    """Where the speed was measured; empty: it was stated."""

    @property
    def seconds(self) -> float:
        """Seconds for embedding all texts."""
        return self.sample.in_all[1] / self.texts_per_second

    @property
    def vector_bytes(self) -> int:
        """Bytes of all vectors in their number type."""
        schema = Layout(self.dimensions, self.run.store.number_type, {}).schema
        kind = schema.field(VECTOR).type
        return int(self.sample.in_all[1] * kind.list_size * kind.value_type.bit_width // 8)

    def price(self, per_hour: float | None) -> float | None:
        """Price of embedding all texts; None without a price per hour."""
        million = Cost(10**6, 10**6 / self.texts_per_second, None, per_hour).price_of_a_million
        return None if million is None else million * self.sample.in_all[1] / 10**6


def estimate(run: IndexRun, texts_per_second: float | None = None) -> IndexEstimate:
    """Estimate a job from a sample of its documents.

    Args:
        texts_per_second: of all workers; None: measured on this machine on a part of the sample.

    Raises:
        RayembedError: as the job, of the model and the documents.
    """
    run = settled_run(run)
    uri = tracking_uri_of(run)
    reference = pinned_reference(run.model.reference, uri)
    folder = find_folder(reference, uri)
    pieces = document_pieces(run.documents, versions=False)
    columns = settled_columns(run.documents, pieces)
    tokenizer = tokenizer_of(folder)
    check_size(
        run.documents.chunks, tokenizer, tokenizer.prompt(run.model.instruction or "", "document")
    )
    documents, share = _sampled(pieces, columns)
    if not documents:
        raise DataError(f"{run.documents.path!r} has no document in its first rows")
    split = splitter(run.documents.chunks, tokenizer)
    texts = tuple(piece for pieces in split(documents) for piece in pieces)
    tokens = sum(len(one["input_ids"]) for one in tokenizer(texts, "document", allow_empty=True))
    sample = DocumentSample(len(documents), texts, tokens, share)
    dimensions = run.model.dimensions or saved_widths(folder)[0]
    if texts_per_second is not None:
        return IndexEstimate(run, sample, dimensions, texts_per_second, "")
    device = default_device() if run.placement.use_gpu else "cpu"
    spec = IndexModelSpec(
        reference,
        weights_fingerprint(folder),
        uri,
        run.model.instruction,
        dimensions,
        settled(run.model.dtype, device),
        run.model.tokens_per_batch,
        "",
    )
    rate = _rate(LoadedModel(spec, device), texts[:: max(1, len(texts) // _TEXTS)][:_TEXTS])
    return IndexEstimate(run, sample, dimensions, rate, f"measured here ({device}, {spec.dtype})")


def _rate(model: LoadedModel, texts: Sequence[str]) -> float:
    """Measure the texts that a model embeds in a second."""
    model.encode(texts[:8])
    began = time.perf_counter()
    model.encode(texts)
    return len(set(texts)) / (time.perf_counter() - began)


def _sampled(pieces: Sequence[FilePiece], columns: DocumentColumns) -> tuple[list[str], float]:
    """Read documents from the first files, and the share of all that they are by their bytes, of
    Parquet by its rows.
    """
    texts: list[str] = []
    read = 0.0
    firsts = first_pieces(pieces)
    for piece in firsts:
        wanted = -(-_DOCUMENTS // len(firsts))
        count, end = 0, 0
        for row in islice(read_rows(piece, columns.read), wanted):
            count += 1
            end = max(end, _end_of(row.origin) if isinstance(row, Row) else 0)
            try:
                text = text_in(row.values, columns.text) if isinstance(row, Row) else None
            except RowError:
                text = None
            if text is not None and has_content(text):
                texts.append(text)
        read += _bytes_of(piece, count, end, texts[-count:] if count else [], wanted)
    size = sum(_size_of(piece) for piece in pieces)
    return texts, min(1.0, max(read, 1.0) / max(size, 1))


def _bytes_of(piece: FilePiece, count: int, end: int, texts: Sequence[str], wanted: int) -> float:
    """Bytes of a piece that its first rows take."""
    size = _size_of(piece)
    if count < wanted:
        return size
    if piece.kind == "parquet":
        return size * count / max(_rows_of(piece), count)
    if piece.kind == "text":
        return size * count / max(len(piece.texts), count)
    if end:  # JSONL: where the last row begins
        return min(size, (end - piece.start) * count / max(count - 1, 1))
    return min(size, sum(len(text.encode()) + 20 for text in texts))


def _size_of(piece: FilePiece) -> float:
    return piece.size * (_ZIPPED if piece.name.endswith(".gz") else 1)


def _rows_of(piece: FilePiece) -> int:
    filesystem, inside = open_source(piece.path)
    with filesystem.open_input_file(inside) as file:
        metadata = open_parquet(file).metadata
    stop = metadata.num_row_groups if piece.stop is None else piece.stop
    return sum(metadata.row_group(number).num_rows for number in range(piece.start, stop))


def _end_of(origin: str) -> int:
    """Byte at which a row of JSONL begins; 0 for other files."""
    digits = origin.rpartition("@")[2]
    return int(digits) if digits.isdecimal() else 0


def print_estimate(found: IndexEstimate, price_per_hour: float | None, out: TextIO) -> None:
    """Print the estimate as a table."""
    documents, texts, tokens = found.sample.in_all
    about = "" if found.sample.share == 1 else f" (from {found.sample.documents:,} of them)"
    speed = f"{found.texts_per_second:,.0f} texts/s, {found.measured or 'as stated'}"
    facts = {
        "model": f"{shown_reference(found.run.model.reference)}, {found.dimensions} dimensions",
        "documents": f"{documents:,}{about}",
        "texts": f"{texts:,}, {tokens:,} tokens",
        "speed": speed,
        "time": f"{duration(found.seconds)} for embedding all; an update takes its share",
        "vectors": f"{found.vector_bytes / 1e9:,.3f} GB in {found.run.store.number_type}",
        "store": place_of(found.run.store),
    }
    price = found.price(price_per_hour)
    if price is not None:
        facts["price"] = f"{price:,.2f} at {price_per_hour:,.2f} an hour"
    console(out).print(facts_table(f"Index {found.run.name}", facts))

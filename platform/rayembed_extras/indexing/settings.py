"""Settings of an index: model, documents, chunks, and the store that gets the vectors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rayembed.config.data_run import TeacherPlacement
from rayembed.config.document import Document
from rayembed.config.settings import Settings
from rayembed.config.sources import DEFAULT_REJECTED_SHARE, Column
from rayembed.config.table import SettingsTable
from rayembed.config.types import FileName, ModelReference, PlainName, Reference

NumberType = Literal["float32", "float16", "int8", "bits"]
"""Number type in which a store keeps vectors: `int8` has one code a dimension, `bits` one bit."""

MetadataType = Literal[
    "string", "int64", "double", "bool", "date", "timestamp", "timestamp with zone", "list of texts"
]
"""Type of a metadata column."""


_SECRET = re.compile(r"(?:^|_)(?:password|passwd|secret|token|api_?key|access_key)(?:_|$)", re.I)


def _secret_key(values: Mapping[str, Any]) -> str | None:
    """Return the first key, at any depth, that names a secret; None: there is none."""
    for key, value in values.items():
        if _SECRET.search(str(key)):
            return str(key)
        if isinstance(value, Mapping) and (found := _secret_key(value)):
            return found
    return None


class Chunks(Settings):
    """Settings for how a document is divided into the texts that are embedded."""

    by: Literal["document", "tokens", "sentences", "headings"] = "document"
    """`document`: one text, of which the model reads the first tokens. `tokens`: pieces of `size`
    tokens. `sentences`: as many whole sentences as fit into `size` tokens. `headings`: one piece
    for each section of Markdown or wiki headings, divided by sentences where it is longer."""
    size: PositiveInt = 256
    """Maximum tokens of a piece, by the model's tokenizer."""
    overlap: int = Field(default=0, ge=0)
    """Tokens of the piece before that a piece repeats at its start; with `sentences` the whole
    sentences that fit into them."""

    @model_validator(mode="after")
    def _pieces_advance(self) -> Self:
        if self.overlap >= self.size:
            raise ValueError(
                f"overlap {self.overlap} must be below size {self.size}, or a piece would hold "
                "nothing new"
            )
        return self


class Documents(Settings):
    """Settings of the documents to embed: files of rows, or folders of texts."""

    path: Reference = Field(min_length=1)
    """File, folder, prefix or pattern of Parquet, JSONL, CSV or TSV files, or of texts (`.txt`,
    `.md`), on disk, `s3://`, `gs://` or `hf://`."""
    id: Column | None = None
    """Column with the unique id of a document. None: the column `id` or `_id` where the first file
    has one (BEIR's layout), else the text's hash, so that equal texts become one document."""
    text: Column = "text"
    """Column of the text; `title+text` joins several by a space."""
    metadata: tuple[Column, ...] = ()
    """Columns that are stored beside the vectors, for filters and display."""
    metadata_types: dict[Column, MetadataType] = Field(default_factory=dict)
    """Metadata column → its type, for a column without values when the index is built, or with
    whole numbers that later get fractions (`double`). Others have the type of their values; without
    any, `string`."""
    store_text: bool = True
    """Whether the store also keeps the text."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Delimiter of CSV and TSV cells; None: by the file's ending."""
    encoding: FileName | None = None
    """Encoding of all files but Parquet; None: UTF-8."""
    max_rejected_share: float = Field(default=DEFAULT_REJECTED_SHARE, ge=0.0, le=1.0)
    """Share of rows without a usable document above which the job is refused."""
    max_deleted_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the index's documents above which an update that would delete them is refused: the
    files are all documents, not the new ones alone."""
    chunks: Chunks = Chunks()

    @model_validator(mode="after")
    def _types_are_of_metadata(self) -> Self:
        if unknown := sorted(self.metadata_types.keys() - {*self.metadata}):
            raise ValueError(
                f"metadata_types has {unknown[0]!r}, which is not in metadata "
                f"({', '.join(self.metadata) or 'no column'})"
            )
        return self


class IndexModel(Settings):
    """Settings of the model that embeds the documents."""

    reference: ModelReference = Field(min_length=1)
    """Folder, `models:/name@alias`, `hf://…`, `s3://…` or a short name. The index stores which
    version an alias named."""
    instruction: str | None = None
    """Task definition before each document; None: the model's own for documents; empty: none."""
    dimensions: PositiveInt | None = None
    """First dimensions to keep, one of those the model was trained for (Matryoshka); None: all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of the model's computation; `auto`: bfloat16 where the hardware computes it fast;
    the index stores which, for its updates."""
    tokens_per_batch: PositiveInt | None = None
    """Maximum padded tokens of a forward pass; None: by hardware."""


@dataclass(frozen=True)
class RowLimits:
    """Largest sizes of a row in UTF-8 bytes that a store takes; None: no limit."""

    id: int | None = None
    texts: int | None = None
    """Text and metadata together."""


NO_LIMITS = RowLimits()


class StoreSettings(Settings):
    """Base class for the settings of a vector store, the members of `STORES`."""

    if TYPE_CHECKING:
        kind: str
        """Name in the table."""

    number_types: ClassVar[tuple[NumberType, ...]] = ("float32",)
    """Number types that the store can keep."""
    changeable: ClassVar[frozenset[str]] = frozenset({"index"})
    """Settings that may change from one job of an index to the next: none of where its rows are."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules of the store's client, which the extra `indexes` installs."""
    limits: ClassVar[RowLimits] = NO_LIMITS
    """Sizes above which documents are rejected when they are read."""
    number_type: NumberType = "float32"
    """Number type of the stored vectors."""
    index: dict[str, Any] = Field(default_factory=dict)
    """Settings of the store's own approximate index, passed on as they are; empty: as the index
    has them, and for a new one the store's defaults or exact search, as docs/stores.md says."""

    @model_validator(mode="after")
    def _keeps_the_type(self) -> Self:
        if self.number_type not in self.number_types:
            raise ValueError(
                f"the store {self.kind} keeps {', '.join(self.number_types)}, not "
                f"{self.number_type}; choose one of them"
            )
        return self

    @model_validator(mode="after")
    def _names_no_secret(self) -> Self:
        for name, value in dict(self).items():
            if isinstance(value, Mapping) and (key := _secret_key(value)):
                raise ValueError(
                    f"{name} has the key {key!r}, but settings are printed and recorded; a "
                    "password or key of a store is read from the environment (docs/stores.md)"
                )
        return self

    def open(self) -> Any:
        """Connect to the store and return a `store.VectorStore`; loads the client's packages.

        Raises:
            ConfigError: the packages are missing, an address or a password is wrong.
            StorageError: the store does not answer.
        """
        raise TypeError(f"{type(self).__name__} does not implement open")


STORES = SettingsTable(
    "rayembed.stores",
    StoreSettings,
    (
        "rayembed_extras.indexing.stores.parquet:ParquetStore",
        "rayembed_extras.indexing.stores.lance:LanceStore",
        "rayembed_extras.indexing.stores.pgvector:PgvectorStore",
        "rayembed_extras.indexing.stores.qdrant:QdrantStore",
        "rayembed_extras.indexing.stores.faiss_file:FaissStore",
    ),
    default="parquet",
)
"""Vector stores by kind; other packages add theirs by entry points."""

if TYPE_CHECKING:
    AnyStore = StoreSettings
else:
    AnyStore = STORES.union()


class IndexRun(Document):
    """Settings of an index: a model embeds documents into a store."""

    name: PlainName
    """Name of the index: of its folder below `placement.storage_path`/indexes, and of the alias,
    view or file by which the store's clients find the current table."""
    model: IndexModel
    documents: Documents
    store: AnyStore = Field(default={"kind": "parquet"})  # type: ignore[assignment]
    tracking_uri: Reference | None = None
    """MLflow's address for `models:/…` and for the registration of the index; None: the SQLite file
    in `placement.storage_path`."""
    rows_per_part: PositiveInt = 16_384
    """Documents that are embedded and written together: the unit of work after which a killed job
    goes on, and what a process holds in memory."""
    placement: TeacherPlacement = TeacherPlacement()

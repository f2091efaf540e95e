"""Vector store `qdrant`: a Qdrant server, or its client's local mode in a folder."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from rayembed.config.table import load
from rayembed.config.types import Reference
from rayembed.errors import require_packages
from rayembed_extras.indexing.settings import NumberType, RowLimits
from rayembed_extras.indexing.stores.secret import SecretStoreSettings, SecretVariable

INSTEAD = {
    "int8": "{scalar: {type: int8, always_ram: true}}",
    "bits": "{binary: {always_ram: true}}",
}
"""Number type that Qdrant does not store → its quantisation that searches by such codes."""


class QdrantStore(SecretStoreSettings):
    """Settings of the store `qdrant`: each table is a collection, the index's name an alias of the
    current one.

    `index` is passed to `create_collection`: `hnsw_config: {m: 16, ef_construct: 100}`,
    `quantization_config: {scalar: {type: int8}}`, `optimizers_config`, `shard_number`,
    `replication_factor`, `on_disk_payload`, and `on_disk` of the vectors. Empty: Qdrant's defaults,
    an HNSW graph from 10,000 KB of vectors on. The local mode ignores it and searches exactly.
    """

    kind: Literal["qdrant"] = "qdrant"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16")
    packages: ClassVar[tuple[str, ...]] = ("qdrant_client",)
    secret_from: ClassVar[str] = "key_from"
    # Of a server's request of 32 MiB, in which JSON escapes some characters.
    limits: ClassVar[RowLimits] = RowLimits(texts=16 << 20)
    changeable: ClassVar[frozenset[str]] = frozenset(
        {"index", "key_from", "payload_indexes", "prefer_grpc", "timeout_seconds"}
    )

    to: Reference = "http://localhost:6333"
    """Address of the server, `http://host:6333` or `https://…`; else a local folder, for the
    client's local mode: one process at a time, exact search in memory, meant for up to 20,000
    rows."""
    key_from: SecretVariable = "QDRANT_API_KEY"
    """Environment variable with the server's API key, in all processes that write."""
    payload_indexes: dict[str, Any] = Field(default_factory=dict)
    """Metadata column → type of Qdrant's payload index for filters: `keyword`, `integer`, `float`,
    `bool`, `datetime`, `uuid`, `text`, or its settings, `{type: keyword, is_tenant: true}`."""
    prefer_grpc: bool = False
    """Whether to write and search by gRPC, on port 6334."""
    timeout_seconds: PositiveInt = 60
    """Seconds to wait for an answer."""

    @field_validator("number_type")
    @classmethod
    def _has_codes(cls, number_type: str) -> str:
        if number_type in INSTEAD:
            raise ValueError(
                f"Qdrant stores no vectors of {number_type}; store float16 or float32 and let it "
                "search by codes that it makes itself: store.index.quantization_config="
                + INSTEAD[number_type]
            )
        return number_type

    @field_validator("to")
    @classmethod
    def _is_of_a_place(cls, to: str) -> str:
        if to == ":memory:" or ("://" in to and not to.startswith(("http://", "https://"))):
            raise ValueError("must be http://host:6333, https://host, or a local folder")
        return to

    @property
    def is_server(self) -> bool:
        """Whether a server has the collections, not a folder."""
        return self.to.startswith(("http://", "https://"))

    def open(self) -> Any:
        """Connect to the server, or open the folder."""
        require_packages("the store qdrant", "indexes", *self.packages)
        client = "QdrantServer" if self.is_server else "QdrantFolder"
        return load(f"rayembed_extras.indexing.stores.qdrant_tables:{client}")(self)

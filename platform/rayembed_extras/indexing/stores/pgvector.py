"""Vector store `pgvector`."""

from typing import ClassVar, Literal

from rayembed_extras.indexing.settings import NumberType, StoreSettings


class PgvectorStore(StoreSettings):
    """Settings of the store `pgvector`."""

    kind: Literal["pgvector"] = "pgvector"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")

"""Vector store `qdrant`."""

from typing import ClassVar, Literal

from rayembed_extras.indexing.settings import NumberType, StoreSettings


class QdrantStore(StoreSettings):
    """Settings of the store `qdrant`."""

    kind: Literal["qdrant"] = "qdrant"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")

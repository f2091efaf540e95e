"""Vector store `faiss`."""

from typing import ClassVar, Literal

from rayembed_extras.indexing.settings import NumberType, StoreSettings


class FaissStore(StoreSettings):
    """Settings of the store `faiss`."""

    kind: Literal["faiss"] = "faiss"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")

"""Vector store `lance`."""

from typing import ClassVar, Literal

from rayembed_extras.indexing.settings import NumberType, StoreSettings


class LanceStore(StoreSettings):
    """Settings of the store `lance`."""

    kind: Literal["lance"] = "lance"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")

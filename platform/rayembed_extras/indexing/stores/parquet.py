"""Vector store `parquet`."""

from typing import ClassVar, Literal

from rayembed_extras.indexing.settings import NumberType, StoreSettings


class ParquetStore(StoreSettings):
    """Settings of the store `parquet`."""

    kind: Literal["parquet"] = "parquet"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")

"""Vector store `parquet`: files that pyarrow, DuckDB, Ray Data and others read as they are."""

from typing import Any, ClassVar, Literal

from rayembed.config.types import Reference
from rayembed.errors import ConfigError
from rayembed_extras.indexing.settings import NumberType, StoreSettings


class ParquetStore(StoreSettings):
    """Settings of the store `parquet`: a folder of files, also in object storage."""

    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")
    kind: Literal["parquet"] = "parquet"
    to: Reference | None = None
    """Folder of the tables, on a disk that all machines see, `s3://` or `gs://`; None: the folder
    `store` of the index."""

    def open(self) -> Any:
        """Return the tables in the folder; nothing is opened before it is used.

        Raises:
            ConfigError: no folder is set, or settings of an index that the store does not have.
        """
        from rayembed_extras.indexing.stores.parquet_tables import ParquetTables

        if self.to is None:
            raise ConfigError("store.to: name the folder of the tables")
        if self.index:
            raise ConfigError(
                f"store.index={self.index}: the store parquet has no index of its own, its search "
                "is exact; leave it out, or choose another store (store.kind=lance)"
            )
        return ParquetTables(self.to)

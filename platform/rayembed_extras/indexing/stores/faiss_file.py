"""Vector store `faiss`: an index file of FAISS, with ids and rows beside it in Parquet."""

from typing import Any, ClassVar, Literal

from rayembed.config.table import load
from rayembed.config.types import Reference
from rayembed.search.faiss_library import require_faiss
from rayembed_extras.indexing.settings import NumberType, StoreSettings


class FaissStore(StoreSettings):
    """Settings of the store `faiss`: a file for FAISS, held in memory by each process that
    searches it.

    `index.factory` is any text of `faiss.index_factory` (`IVF1024,Flat`, `HNSW32`, `IVF256,PQ48`;
    of `faiss.index_binary_factory` for bits, such as `BIVF1024`); without it the search is exact.
    `index.train_rows` is the number of rows that such an index is trained on, 100,000 by default.
    """

    kind: Literal["faiss"] = "faiss"
    number_types: ClassVar[tuple[NumberType, ...]] = ("float32", "float16", "int8", "bits")
    packages: ClassVar[tuple[str, ...]] = ("faiss",)
    to: Reference | None = None
    """Folder, or `s3://…`, `gs://…`, of the tables. None: where `rayembed index` puts them, below
    `placement.storage_path`."""

    def open(self) -> Any:
        """Open the folder of tables."""
        require_faiss("files of the store faiss")
        return load("rayembed_extras.indexing.stores.faiss_tables:FaissTables")(self)

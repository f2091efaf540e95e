"""What an index needs of a vector store: tables of rows with vectors, and a name that points at the
current table.

A row has `id` (text), `document` (id of the document that the text is a piece of), `chunk` (int32
number of the piece), `text` where it is kept, the metadata columns, and `vector`. N rows, D
dimensions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:  # settings load the stores, which import this module
    from rayembed_extras.indexing.settings import NumberType

VECTOR = "vector"
RESERVED = ("id", "document", "chunk", "text", VECTOR)
"""Columns of a table that no metadata column may be called."""


@dataclass(frozen=True)
class Layout:
    """Columns and vectors of a table."""

    dimensions: int
    """D, as the model gives vectors."""
    number_type: "NumberType"
    metadata: Mapping[str, pa.DataType]
    """Types of the metadata columns; all of them may be null."""
    has_text: bool = True
    scale: float = 1.0
    """Absolute value of a component that int8 code 127 stands for; 1 for other number types."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows that `upsert` takes and `scan` yields; vectors are fixed-size
        lists: of D float32, float16 or int8, or of ceil(D / 8) uint8 for bits (first
        dimension in the highest bit).
        """
        value, width = {
            "float32": (pa.float32(), self.dimensions),
            "float16": (pa.float16(), self.dimensions),
            "int8": (pa.int8(), self.dimensions),
            "bits": (pa.uint8(), -(-self.dimensions // 8)),
        }[self.number_type]
        text = [pa.field("text", pa.string())] if self.has_text else []
        return pa.schema(
            [
                pa.field("id", pa.string(), nullable=False),
                pa.field("document", pa.string(), nullable=False),
                pa.field("chunk", pa.int32(), nullable=False),
                *text,
                *(pa.field(name, kind) for name, kind in self.metadata.items()),
                pa.field(VECTOR, pa.list_(value, width), nullable=False),
            ]
        )


@dataclass(frozen=True)
class SearchResults:
    """Results of a search: one row for each of Q queries, best first, padded with empty ids."""

    ids: list[list[str]]
    """Q lists of at most k ids."""
    scores: np.ndarray
    """(Q, k) float32, the higher the nearer; -inf where there is no result."""


class VectorStore(Protocol):
    """A connection to a vector store; a table is one set of vectors of one model.

    All methods raise StorageError where the store does not answer or is full, and ConfigError where
    it refuses what was given (dimensions, rights, names). Passwords appear in no message.
    """

    has_parallel_writers: ClassVar[bool]
    """Whether several processes may write to one table at once, so that the processes that embed
    write, too; otherwise the job's own process does."""

    def check(self, layout: Layout, name: str) -> None:
        """Raise unless the store accepts such tables under this name: version, extension, rights,
        limits of dimensions and names; writes nothing.
        """
        ...

    def tables(self, name: str) -> list[str]:
        """List the tables of an index, `<name>_1`, `<name>_2`, …, complete or not."""
        ...

    def create(self, table: str, layout: Layout) -> None:
        """Create an empty table; does nothing if it exists with the same columns."""
        ...

    def upsert(self, table: str, rows: pa.Table) -> None:
        """Write rows, replacing rows with the same ids; repeating a call changes nothing."""
        ...

    def delete(self, table: str, ids: Sequence[str]) -> None:
        """Delete the rows of these ids; ids that are not there are ignored."""
        ...

    def finish(self, table: str, layout: Layout) -> None:
        """Make what was written durable and searchable: build or update the store's index by the
        settings, compact small files.
        """
        ...

    def count(self, table: str) -> int:
        """Count the rows of a table."""
        ...

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in batches of bounded size, in any order, with the columns of
        `Layout.schema`.
        """
        ...

    def fetch(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows of these ids, in any order; ids that are not there are left
        out.
        """
        ...

    def search(
        self, table: str, queries: np.ndarray, k: int, options: Mapping[str, Any] | None = None
    ) -> SearchResults:
        """Find the k nearest rows by inner product of unit vectors (cosine), with the store's own
        index.

        Args:
            queries: (Q, D) float32 unit vectors.
            options: the store's own settings of a search, such as `nprobes` or `ef`.
        """
        ...

    def point(self, name: str, table: str) -> None:
        """Let the name refer to this table, in one step: a client sees the former or the new
        one.
        """
        ...

    def pointed(self, name: str) -> str | None:
        """Return the table that the name refers to; None: there is none."""
        ...

    def drop(self, table: str) -> None:
        """Remove a table; does nothing if it is gone. Refuses the table that a name refers to."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...

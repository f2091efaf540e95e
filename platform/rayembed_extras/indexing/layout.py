"""Column types of a table's metadata by name, and the layout of a recorded table."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rayembed.errors import ArtifactError
from rayembed.machine.quantisation import from_bits, from_int8, int8_range, to_bits, to_int8
from rayembed_extras.indexing.manifest import TableRecord
from rayembed_extras.indexing.settings import NumberType
from rayembed_extras.indexing.store import Layout

ARROW_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamp with zone": pa.timestamp("us", tz="UTC"),
    "list of texts": pa.list_(pa.string()),
}
"""Types of metadata columns by their names in the record of an index."""


def arrow_types(metadata: Mapping[str, str]) -> dict[str, pa.DataType]:
    """Convert recorded names of types to Arrow types, by column.

    Raises:
        ArtifactError: a later version recorded a type that this one does not know.
    """
    for column, name in metadata.items():
        if name not in ARROW_TYPES:
            raise ArtifactError(
                f"the metadata column {column!r} has the type {name!r}, which this version of "
                f"rayembed does not know (it knows {', '.join(ARROW_TYPES)}); update rayembed"
            )
    return {column: ARROW_TYPES[name] for column, name in metadata.items()}


def layout_of(record: TableRecord) -> Layout:
    """Return the columns and vectors of a recorded table."""
    made = record.made_by
    number_type: Any = made.number_type
    return Layout(
        dimensions=made.dimensions,
        number_type=number_type,
        metadata=arrow_types(record.metadata),
        has_text=bool(record.documents.get("store_text", True)),
        scale=made.scale,
    )


def scale_of(dimensions: int, number_type: NumberType) -> float:
    """Absolute value of a component that int8 code 127 stands for; 1 for other number types."""
    return int8_range(dimensions) if number_type == "int8" else 1.0


def stored_vectors(vectors: np.ndarray, number_type: NumberType) -> pa.FixedSizeListArray:
    """Convert (N, D) float32 unit vectors to the vector column of `Layout.schema`."""
    match number_type:
        case "int8":
            values = to_int8(vectors)
        case "bits":
            values = to_bits(vectors)
        case _:
            values = vectors.astype(number_type, copy=False)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def loaded_vectors(column: pa.ChunkedArray | pa.Array, layout: Layout) -> np.ndarray:
    """Convert a vector column of `Layout.schema` to (N, D) float32; codes of int8 and bits become
    the numbers that they stand for.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    width = layout.schema.field("vector").type.list_size
    parts = [chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, width) for chunk in chunks]
    values = np.concatenate(parts) if parts else np.empty((0, width), np.float32)
    match layout.number_type:
        case "int8":
            return from_int8(values)
        case "bits":
            return from_bits(values, layout.dimensions)
    return values.astype(np.float32, copy=False)


def as_stored(vectors: np.ndarray, number_type: NumberType) -> np.ndarray:
    """Convert (N, D) float32 unit vectors to what `loaded_vectors` reads of them from a store."""
    layout = Layout(vectors.shape[1], number_type, {})
    return loaded_vectors(stored_vectors(vectors, number_type), layout)


def as_compared(queries: np.ndarray, number_type: NumberType) -> np.ndarray:
    """Convert (Q, D) queries to what stores compare with stored vectors: signs for bits."""
    return as_stored(queries, number_type) if number_type == "bits" else queries

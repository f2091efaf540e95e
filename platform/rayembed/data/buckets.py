"""Rows that travel from all parts to where they belong together: one file a part, cut by bucket.

A task over parts writes its rows sorted by bucket, as Arrow IPC with one record batch a bucket; a
task over buckets reads its batch of every file and no other bytes. So neither holds more than a
part or a bucket, however many there are of each.
"""

import io
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rayembed.assets.storage import open_storage, write_atomic
from rayembed.errors import ArtifactError


def write_buckets(path: str, table: pa.Table, bucket: np.ndarray, num_buckets: int) -> None:
    """Write the rows of the table with those of each bucket together, in their order.

    Args:
        bucket: (rows,) of each row, from 0 to `num_buckets`, that one excluded.
    """
    order = np.argsort(bucket, kind="stable")
    edges = np.searchsorted(bucket[order], np.arange(num_buckets + 1))
    batches = table.take(pa.array(order)).combine_chunks().to_batches()
    ordered = batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            writer.write_batch(ordered.slice(first, last - first))
    write_atomic(path, buffer.getvalue())


def read_bucket(paths: Sequence[str], bucket: int) -> list[pa.RecordBatch]:
    """The rows of a bucket, a batch for each file, in the files' order.

    Raises:
        ArtifactError: a file is missing or broken.
    """
    found = []
    for path in paths:
        filesystem, inside = open_storage(path)
        try:
            with filesystem.open_input_file(inside) as file:
                found.append(pa.ipc.open_file(file).get_batch(bucket))
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"cannot read bucket {bucket} of {path!r}: {error}") from error
    return found


def vector_column(vectors: np.ndarray) -> pa.Array:
    """(n, D) float16 as a column of lists of fixed length."""
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float16).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def vectors_of(column: pa.Array) -> np.ndarray:
    """What `vector_column` made a column of."""
    width = column.type.list_size
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(-1, width)

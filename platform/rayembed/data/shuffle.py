"""Rows brought together by a key, at any size: tasks scatter them, tasks gather a bucket each.

What one task scatters is one Arrow file with a batch for each bucket, so there are as many files
as tasks and not as tasks times buckets, and who gathers a bucket reads one range of each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import xxhash

from rayembed.assets.storage import join, open_storage, write_atomic
from rayembed.data.hashes import text_hash
from rayembed.errors import ArtifactError

BYTES_PER_BUCKET = 32 << 20
"""That one task gathers, about."""

_MOST_BUCKETS = 4096
_BYTES_WAITING = 64 << 20


def number_of_buckets(size: int, bytes_per_bucket: int = BYTES_PER_BUCKET) -> int:
    """Buckets for so many bytes: it follows from the data, never from the cluster."""
    return min(max(1, -(-size // bytes_per_bucket)), _MOST_BUCKETS)


def bucket_of(key: str, buckets: int) -> int:
    """Where rows of a key go."""
    return text_hash(key) % buckets


class Scatter:
    """Collects the rows of one task by bucket, and writes files whenever enough are there."""

    def __init__(self, folder: str, schema: pa.Schema, buckets: int) -> None:
        self.folder, self.schema, self.buckets = folder, schema, buckets
        self.files: list[str] = []
        self._waiting: list[list[Mapping[str, Any]]] = [[] for _ in range(buckets)]
        self._bytes = 0

    def add(self, bucket: int, row: Mapping[str, Any]) -> None:
        """Put a row of the schema into a bucket."""
        self._waiting[bucket].append(row)
        self._bytes += sum(len(value) for value in row.values() if isinstance(value, str))
        self._bytes += 8 * len(row)
        if self._bytes > _BYTES_WAITING:
            self._flush()

    def finish(self) -> list[str]:
        """Names of the files, in the order in which the rows came."""
        self._flush()
        return self.files

    def _flush(self) -> None:
        if not any(self._waiting):
            return
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, self.schema, options=options) as writer:
            for rows in self._waiting:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, self.schema))
        content = sink.getvalue().to_pybytes()
        name = f"{xxhash.xxh3_128_hexdigest(content)}.arrow"
        write_atomic(join(self.folder, name), content)
        self.files.append(name)
        self._waiting = [[] for _ in range(self.buckets)]
        self._bytes = 0


def gather(folder: str, files: Sequence[str], bucket: int) -> list[dict[str, Any]]:
    """The rows of a bucket, file after file, each in the order in which they were added.

    Raises:
        ArtifactError: a file is missing or broken.
    """
    rows: list[dict[str, Any]] = []
    for name in files:
        path = join(folder, name)
        filesystem, inside = open_storage(path)
        try:
            with filesystem.open_input_file(inside) as file:
                rows += pa.ipc.open_file(file).get_batch(bucket).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"cannot read the scattered rows {path!r}: {error}") from error
    return rows

"""Shuffle of rows by a key at any size: tasks scatter rows to buckets, others gather a bucket each.

A scatter task writes one file, bucket after bucket, with the offsets at its end: as many files as
tasks, not tasks times buckets, and a gather task reads one range of each.

    segments (each a seal, then an Arrow stream or nothing) | int64 place of each and of the end |
    int64 buckets
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import xxhash

from rayembed.assets.arrow_files import read_stream
from rayembed.assets.sealing import SEAL_BYTES, check_seal, seal_of
from rayembed.assets.storage import join, open_storage, unreadable, write_atomic
from rayembed.data.hashes import text_hash
from rayembed.data.parts import remedy
from rayembed.errors import ArtifactError

BYTES_PER_BUCKET = 32 << 20
"""Bytes that one gather task reads, approximately."""

_MOST_BUCKETS = 4096
_BYTES_WAITING = 64 << 20
_BYTES_OF_A_ROW = 400
"""Overhead of a row's Python objects in bytes, in addition to its texts."""

_PLACE = np.dtype("<i8")


def number_of_buckets(size: int, bytes_per_bucket: int = BYTES_PER_BUCKET) -> int:
    """Number of buckets for a data size in bytes; independent of the cluster."""
    return min(max(1, -(-size // bytes_per_bucket)), _MOST_BUCKETS)


def bucket_of(key: str, buckets: int) -> int:
    """Bucket number of a key."""
    return text_hash(key) % buckets


@dataclass(frozen=True)
class Bucket:
    """Work item: one bucket."""

    number: int

    @property
    def key(self) -> str:
        """Number of the bucket."""
        return str(self.number)


class Scatter:
    """Collects one task's rows by bucket and writes a file whenever enough have accumulated."""

    def __init__(self, folder: str, schema: pa.Schema, buckets: int) -> None:
        self.folder, self.schema, self.buckets = folder, schema, buckets
        self.files: list[str] = []
        self._waiting: list[list[Mapping[str, Any]]] = [[] for _ in range(buckets)]
        self._bytes = 0

    def add(self, bucket: int, row: Mapping[str, Any]) -> None:
        """Add a row of the schema to a bucket."""
        self._waiting[bucket].append(row)
        self._bytes += sum(len(value) for value in row.values() if isinstance(value, str))
        self._bytes += _BYTES_OF_A_ROW
        if self._bytes > _BYTES_WAITING:
            self._flush()

    def finish(self) -> list[str]:
        """Names of the written files, in the order in which rows came."""
        self._flush()
        return self.files

    def _flush(self) -> None:
        if not any(self._waiting):
            return
        tables = (pa.Table.from_pylist(rows, self.schema) for rows in self._waiting)
        content = _file_of([_packed(table) for table in tables])
        name = f"{xxhash.xxh3_128_hexdigest(content)}.arrow"
        write_atomic(join(self.folder, name), content)
        self.files.append(name)
        self._waiting = [[] for _ in range(self.buckets)]
        self._bytes = 0


def gather(folder: str, files: Sequence[str], bucket: int) -> list[dict[str, Any]]:
    """Rows of a bucket, file after file, each in its original order.

    Raises:
        ArtifactError: a file is missing or broken.
    """
    tables = read_bucket([join(folder, name) for name in files], bucket)
    return [row for table in tables if table is not None for row in table.to_pylist()]


def write_buckets(path: str, table: pa.Table, bucket: np.ndarray, num_buckets: int) -> None:
    """Write a table as one file, grouped by bucket and otherwise in its order.

    Args:
        bucket: (rows,) of each row, from 0 to `num_buckets`, that one excluded.
    """
    order = np.argsort(bucket, kind="stable")
    edges = np.searchsorted(bucket[order], np.arange(num_buckets + 1)).tolist()
    ordered = table.take(pa.array(order))
    segments = [_packed(ordered.slice(a, b - a)) for a, b in pairwise(edges)]
    write_atomic(path, _file_of(segments))


def read_bucket(paths: Sequence[str], bucket: int) -> list[pa.Table | None]:
    """Tables of one bucket, one for each file; None for a file without rows of it.

    Raises:
        ArtifactError: a file is missing or broken.
    """
    found: list[pa.Table | None] = []
    for path in paths:
        filesystem, inside = open_storage(path)
        try:
            with filesystem.open_input_file(inside) as file:
                end = file.size() - _PLACE.itemsize
                buckets = int(np.frombuffer(file.read_at(_PLACE.itemsize, end), _PLACE)[0])
                place = end - _PLACE.itemsize * (buckets + 1 - bucket)
                _check_order(0, place, end)
                told = np.frombuffer(file.read_at(2 * _PLACE.itemsize, place), _PLACE)
                start, stop = told.tolist()
                _check_order(0, start, stop, end)
                segment = file.read_at(stop - start, start)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise unreadable(error)(
                f"cannot read the scattered rows {path!r}: {error}. {remedy(path)}"
            ) from error
        found.append(_rows_of(segment, path))
    return found


def _check_order(*places: int) -> None:
    if list(places) != sorted(places):
        raise ValueError(f"its table of places is broken: {places}")


def _rows_of(segment: bytes, path: str) -> pa.Table | None:
    try:
        check_seal(segment[SEAL_BYTES:], segment[:SEAL_BYTES])
        return read_stream(segment[SEAL_BYTES:]) if len(segment) > SEAL_BYTES else None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ArtifactError(
            f"the scattered rows {path!r} are broken: {error}. {remedy(path)}"
        ) from error


def _file_of(segments: Sequence[bytes]) -> bytes:
    sealed = [seal_of(segment) + segment for segment in segments]
    tail = [*np.cumsum([0, *map(len, sealed)]).tolist(), len(sealed)]
    return b"".join([*sealed, np.array(tail, _PLACE).tobytes()])


def _packed(table: pa.Table) -> bytes:
    """Rows as an Arrow stream; empty bytes without rows."""
    if not len(table):
        return b""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())

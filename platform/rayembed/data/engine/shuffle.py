"""File format of shuffled rows: a task writes one file, sorted by bucket, and each reader reads
only the range of its bucket. `exchange` has the tasks.

    int64 place of each segment and of the end | segments (each a seal, then an Arrow stream or
    nothing)
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import xxhash

from rayembed.assets.array_files import SEAL_BYTES, check_seal, seal_of
from rayembed.assets.arrow_files import read_stream
from rayembed.assets.clients import read_with_retries, why
from rayembed.assets.storage import join, open_storage, unreadable, write_atomic
from rayembed.data.engine.parts import remedy
from rayembed.data.hashes import text_hash
from rayembed.errors import ArtifactError, StorageError

BYTES_PER_BUCKET = 32 << 20
"""Bytes that one gather task reads, approximately."""

FAN_OUT = 128
"""Maximum number of segments of a file, if there are more buckets: see `Route`. A part's segments
have 64 rows then, some 100 kB; smaller ones are mostly requests."""

_READ_AT_ONCE = 32
"""Ranges that one task reads at a time, as each waits for the storage's answers."""

_BUCKET = "bucket"

_BYTES_WAITING = 64 << 20
_BYTES_OF_A_ROW = 400
"""Overhead of a row's Python objects in bytes, in addition to its texts."""

_PLACE = np.dtype("<i8")


def number_of_buckets(size: int, bytes_per_bucket: int = BYTES_PER_BUCKET) -> int:
    """Choose the number of buckets for this many bytes of data, independent of the size of the
    cluster.
    """
    return max(1, -(-size // bytes_per_bucket))


def bucket_of(key: str, buckets: int) -> int:
    """Number of the bucket to which a key belongs, by its hash."""
    return text_hash(key) % buckets


@dataclass(frozen=True)
class Bucket:
    """Work item: one bucket of shuffled rows."""

    number: int

    @property
    def key(self) -> str:
        """Number of the bucket."""
        return str(self.number)


@dataclass(frozen=True)
class Route:
    """How rows reach their bucket: directly, or in several rewrites by way of coarser
    buckets.

    With as many tasks as buckets, both growing with the rows, a range of each file for each bucket
    would be ranges by the square of the rows. So a file is cut into at most `FAN_OUT` segments, and
    where that is fewer than there are buckets, tasks read as many segments of one coarse bucket,
    and write a file cut more finely, until a segment has rows of a single bucket.
    """

    buckets: int
    levels: int
    """Number of times that rows are written."""
    fan: int
    """Number of segments of a file of each level but the first, and of files that one is made of.
    """

    @classmethod
    def to(cls, buckets: int) -> "Route":
        """Make the route to a number of buckets, with as few levels as `FAN_OUT` allows."""
        levels, fan = 1, 1
        while FAN_OUT**levels < buckets:
            levels += 1
        while fan**levels < buckets:
            fan += 1
        return cls(buckets, levels, fan)

    def coarse(self, bucket: Any, level: int) -> Any:
        """Number of the coarse bucket that contains a bucket, at a level counted from 1."""
        return bucket // self.fan ** (self.levels - level)

    def count(self, level: int) -> int:
        """Number of coarse buckets at a level."""
        return int(self.coarse(self.buckets - 1, level)) + 1


class Scatter:
    """Collects the rows of one task by bucket, and writes a file whenever enough rows have
    accumulated.
    """

    def __init__(self, folder: str, schema: pa.Schema, buckets: int) -> None:
        self.folder, self.schema, self.route = folder, schema, Route.to(buckets)
        self.files: list[str] = []
        self._start()

    def add(self, bucket: int, row: Mapping[str, Any]) -> None:
        """Add a row, which has the columns of the schema, to a bucket."""
        self._buckets.append(bucket)
        self._rows.append(row)
        self._bytes += sum(len(value) for value in row.values() if isinstance(value, str))
        self._bytes += _BYTES_OF_A_ROW
        if self._bytes > _BYTES_WAITING:
            self._flush()

    def finish(self) -> list[str]:
        """Write the remaining rows, and return the names of all written files in the order of their
        rows.
        """
        self._flush()
        return self.files

    def _start(self) -> None:
        self._buckets: list[int] = []
        self._rows: list[Mapping[str, Any]] = []
        self._bytes = 0

    def _flush(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows, self.schema)
        content = _file_of(_sent(table, np.array(self._buckets), self.route))
        name = f"{xxhash.xxh3_128_hexdigest(content)}.arrow"
        write_atomic(join(self.folder, name), content)
        self.files.append(name)
        self._start()


def send_rows(path: str, table: pa.Table, bucket: np.ndarray, route: Route) -> None:
    """Divide a table's rows among buckets and write them as one file, for the first level of the
    shuffle.

    Args:
        bucket: (rows,) of each row, from 0 to `route.buckets`, that one excluded.
    """
    write_atomic(path, _file_of(_sent(table, bucket, route)))


def forward_rows(path: str, tables: Sequence[pa.Table], route: Route, level: int) -> None:
    """Write rows of one coarse bucket as a file that is divided into the finer buckets of the next
    level.
    """
    if not tables:
        write_buckets(path, pa.table({}), np.empty(0, np.int64), route.fan)
        return
    table = pa.concat_tables(tables, promote_options="default")
    bucket = table[_BUCKET].to_numpy()
    number = route.coarse(bucket, level + 1) - route.coarse(bucket, level) * route.fan
    if level + 1 == route.levels:
        table = table.drop_columns([_BUCKET])
    write_buckets(path, table, number, route.fan)


def write_buckets(path: str, table: pa.Table, bucket: np.ndarray, num_buckets: int) -> None:
    """Write a table as one file, with rows grouped by bucket and otherwise in their order.

    Args:
        bucket: (rows,) of each row, from 0 to `num_buckets`, that one excluded.
    """
    write_atomic(path, _file_of(_segments(table, bucket, num_buckets)))


def read_bucket(paths: Iterable[str], bucket: int) -> list[pa.Table | None]:
    """Read one bucket from all files: one table for each file, None where a file has no
    rows of it.

    Many are read at a time.

    Raises:
        ArtifactError: a file is missing or broken.
    """
    paths = list(paths)
    if len(paths) == 1:
        return [_read_segment(paths[0], bucket)]
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return list(pool.map(lambda path: _read_segment(path, bucket), paths))


def _read_segment(path: str, bucket: int) -> pa.Table | None:
    try:
        segment = read_with_retries(lambda: _segment_bytes(path, bucket))
    except (OSError, ValueError, pa.ArrowException) as error:
        told = f"cannot read the file of shuffled rows {path!r}: {why(error)}"
        if (kind := unreadable(error)) is StorageError:  # the rows may be well
            raise kind(told) from error
        raise kind(f"{told}. {remedy(path)}") from error
    return _rows_of(segment, path)


def _segment_bytes(path: str, bucket: int) -> bytes:
    filesystem, inside = open_storage(path)
    with filesystem.open_input_file(inside) as file:
        size = file.size()
        place = _PLACE.itemsize * bucket
        _check_order(0, place, size)
        told = np.frombuffer(file.read_at(2 * _PLACE.itemsize, place), _PLACE)
        start, stop = told.tolist()
        _check_order(place, start, stop, size)
        return bytes(file.read_at(stop - start, start))


def _check_order(*places: int) -> None:
    if list(places) != sorted(places):
        raise ValueError(f"the segment offsets in the file must not decrease, but are {places}")


def _rows_of(segment: bytes, path: str) -> pa.Table | None:
    try:
        check_seal(segment[SEAL_BYTES:], segment[:SEAL_BYTES])
        return read_stream(segment[SEAL_BYTES:]) if len(segment) > SEAL_BYTES else None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ArtifactError(
            f"the file of shuffled rows {path!r} is broken: {error}. {remedy(path)}"
        ) from error


def _sent(table: pa.Table, bucket: np.ndarray, route: Route) -> list[bytes]:
    """Divide rows into the segments of a first-level file; with several levels, each row keeps its
    bucket number as a column.
    """
    if route.levels > 1:
        table = table.append_column(_BUCKET, pa.array(bucket.astype(np.int64)))
    return _segments(table, route.coarse(bucket, 1), route.count(1))


def _segments(table: pa.Table, bucket: np.ndarray, num_buckets: int) -> list[bytes]:
    order = np.argsort(bucket, kind="stable")
    edges = np.searchsorted(bucket[order], np.arange(num_buckets + 1)).tolist()
    ordered = table.take(pa.array(order))
    return [_sealed(ordered.slice(a, b - a)) for a, b in pairwise(edges)]


def _file_of(segments: Sequence[bytes]) -> bytes:
    first = _PLACE.itemsize * (len(segments) + 1)
    places = np.cumsum([first, *map(len, segments)])
    return b"".join([places.astype(_PLACE).tobytes(), *segments])


def _sealed(table: pa.Table) -> bytes:
    """Encode rows as a segment: a checksum followed by an Arrow stream, which is empty if there are
    no rows.
    """
    sink = pa.BufferOutputStream()
    if len(table):
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    stream = bytes(sink.getvalue().to_pybytes())
    return seal_of(stream) + stream

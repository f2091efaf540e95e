"""Indexes of parts: the columns of all rows that ordering needs, without the rows' texts.

Each part has its own. Of many, the first reader writes one file beside them, which later readers
take instead:

    folder/index-<digest of the parts' names>.arrow    as `shuffle` writes, some parts a segment
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.array_files import load_arrays
from rayembed.assets.storage import exists, store_file
from rayembed.data.engine.parts import Part, index_path, remedy
from rayembed.data.engine.shuffle import BucketFile, read_bucket
from rayembed.errors import StorageError
from rayembed.machine.ahead import done_ahead

log = logging.getLogger(__name__)

_READ_AT_ONCE = 32
"""Index files read at a time; at 40 ms a file, 57,400 of them would take 38 minutes in turn."""

PARTS_OF_CHUNK = 16
"""Parts whose indexes are in memory at a time: 131,072 rows, 4 MB. Fewer have no file together."""

_CHUNKS_AHEAD = 2


@dataclass(frozen=True)
class PartIndex:
    """Columns of rows that batch drawing needs: 29 bytes a row."""

    id_hash: np.ndarray
    """(rows,) int64 hash of the record's id; sorts and identifies rows."""
    query_hash: np.ndarray
    """(rows,) int64 hash of the query's text."""
    num_negatives: np.ndarray
    """(rows,) int32 number of hard negatives."""
    in_batch: np.ndarray
    """(rows,) bool: the row takes part in in-batch negatives."""
    language_hash: np.ndarray
    """(rows,) int64 hash of the language code, `NO_HASH` without one; keeps batches monolingual."""


_DTYPES = {"num_negatives": np.int32, "in_batch": np.bool_}
_COLUMNS = tuple(field.name for field in fields(PartIndex))


def scratch_of_index(parts: Sequence[Part]) -> int:
    """Bytes on this machine's disk while the index of so many parts is put together for the first
    time.
    """
    if len(parts) <= PARTS_OF_CHUNK:
        return 0
    each = sum(np.dtype(_DTYPES.get(name, np.int64)).itemsize for name in _COLUMNS)
    return each * sum(part.rows for part in parts)


def read_column(parts: Sequence[Part], name: str, into: np.ndarray | None = None) -> np.ndarray:
    """(rows,) one column of the index of all parts; nothing else is held.

    Args:
        into: array that takes it, for instance of a file.

    Raises:
        ArtifactError: an index is missing or broken.
    """
    rows, first = sum(part.rows for part in parts), 0
    column = np.empty(rows, _DTYPES.get(name, np.int64)) if into is None else into
    for chunk in index_chunks(parts):
        found = getattr(chunk, name)
        column[first : first + len(found)] = found
        first += len(found)
    return column


def index_chunks(parts: Sequence[Part]) -> Iterator[PartIndex]:
    """Indexes of consecutive parts, some parts at a time, in their order; many files are read at a
    time, as each read of object storage waits for its answer.

    Raises:
        ArtifactError: as `read_column`.
    """
    if len(parts) <= PARTS_OF_CHUNK:
        yield from _of_parts(parts)
        return
    path = _merged_path(parts)
    if path is not None and exists(path):
        yield from _of_file(path, -(-len(parts) // PARTS_OF_CHUNK))
    elif path is not None:
        yield from _written(path, parts)
    else:
        yield from _of_parts(parts)


def _of_parts(parts: Sequence[Part]) -> Iterator[PartIndex]:
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        for first in range(0, len(parts), PARTS_OF_CHUNK):
            loaded = list(pool.map(_load_index, parts[first : first + PARTS_OF_CHUNK]))
            yield PartIndex(
                **{name: np.concatenate([one[name] for one in loaded]) for name in _COLUMNS}
            )


def _of_file(path: str, chunks: int) -> Iterator[PartIndex]:
    read = partial(read_bucket, [path])
    for (table,) in done_ahead(read, range(chunks), read_ahead=_CHUNKS_AHEAD):
        assert table is not None
        yield PartIndex(**{name: table[name].to_numpy(zero_copy_only=False) for name in _COLUMNS})


def _written(path: str, parts: Sequence[Part]) -> Iterator[PartIndex]:
    """Indexes of the parts, which are written as one file while they are read.

    All goes on without the file where it cannot be written, for instance on a full disk, or beside
    data of another team that may only be read.
    """
    problem: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="rayembed-index-") as folder:
        local = Path(folder, "index.arrow")
        with BucketFile(local, -(-len(parts) // PARTS_OF_CHUNK)) as file:
            for chunk in _of_parts(parts):
                if problem is None:
                    try:
                        file.add(pa.table({name: getattr(chunk, name) for name in _COLUMNS}))
                    except OSError as error:
                        problem = error
                yield chunk
            if problem is None:
                try:
                    file.finish()
                    store_file(local, path)
                except (OSError, StorageError) as error:
                    problem = error
    if problem is not None:
        log.info("the index of %d parts is not kept in one file: %s", len(parts), problem)


def _merged_path(parts: Sequence[Part]) -> str | None:
    """Path of the index of all parts; None if they do not lie together."""
    if len({part.path.replace(part.name, "") for part in parts}) > 1:
        return None
    names = xxhash.xxh3_128()
    for part in parts:
        names.update(part.name.encode())
    return parts[0].path.replace(parts[0].name, f"index-{names.hexdigest()}.arrow")


def _load_index(part: Part) -> dict[str, np.ndarray]:
    return load_arrays(index_path(part.path), remedy(part.path))

"""Index files next to Parquet parts: the columns by which rows are ordered, such as hashes, without
the texts.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np

from rayembed.assets.array_files import load_arrays
from rayembed.data.engine.parts import Part, index_path, remedy

PARTS_OF_CHUNK = 32
"""Number of parts whose indexes are in memory together: 262,144 rows, 8 MB. At 40 ms a file in
object storage, 57,400 of them take 72 s."""


@dataclass(frozen=True)
class PartIndex:
    """Columns that are needed to draw rows for batches, 29 bytes per row."""

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


def read_column(parts: Sequence[Part], name: str, into: np.ndarray | None = None) -> np.ndarray:
    """Read one column of the index of all Parquet parts as a (rows,) array; no other column stays
    in memory.

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
    """Iterate over the indexes of consecutive Parquet parts, several parts at a time, in their
    order.

    The files of these are read together, as each read of object storage waits for its answer.

    Raises:
        ArtifactError: as `read_column`.
    """
    with ThreadPoolExecutor(PARTS_OF_CHUNK) as pool:
        for first in range(0, len(parts), PARTS_OF_CHUNK):
            loaded = list(pool.map(_load_index, parts[first : first + PARTS_OF_CHUNK]))
            yield PartIndex(
                **{name: np.concatenate([one[name] for one in loaded]) for name in _COLUMNS}
            )


def _load_index(part: Part) -> dict[str, np.ndarray]:
    return load_arrays(index_path(part.path), remedy(part.path))

"""Places of rows in a plan, given to the tasks that read the rows by files in the storage.

Rows are drawn in the order of steps and read in the order of parts. In between they stand in runs
on this machine's disk, and a run is sorted by itself: memory does not grow with the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.storage import join
from rayembed.data.engine.parts import ROWS_PER_PART, Part
from rayembed.data.engine.shuffle import read_bucket, write_buckets
from rayembed.data.plan.scratch import Runs

_PARTS_OF_FILE = 32
_MOST_FILES = 256
"""Runs that are open at a time, at most; beyond 67 million rows they become longer."""

_BUFFERED = 1 << 17
"""Places that are sent to their runs at a time."""

BYTES_OF_A_PLACE = 16
"""Bytes of scratch for each position."""

_PLACE = np.dtype([("row", "<i8"), ("position", "<i8")])


@dataclass(frozen=True)
class PartPlaces:
    """Work item: a part and where its places stand; a row may have several."""

    part: Part
    file: str
    """Path of the places of several parts."""
    number: int
    """Number of the part among these."""
    first: int
    """First of the places that are meant, and the end of them."""
    last: int

    @property
    def key(self) -> str:
        """Unique name from part and places; the file is named by its content."""
        named = f"{self.file.rpartition('/')[2]}-{self.number}-{self.first}"
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(named.encode())}"

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(m,) int64 row numbers of the part, ascending; (m,) int64 positions, those of a row in
        the order in which they were added; and (m,) int64 how many of its row were added earlier.

        Raises:
            ArtifactError: the file is missing or broken.
        """
        (table,) = read_bucket([self.file], self.number)
        assert table is not None
        row = table["row"].to_numpy().astype(np.int64)
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        turn = np.arange(len(row)) - np.repeat(starts, np.diff(starts, append=len(row)))
        some = slice(self.first, self.last)
        return row[some], table["position"].to_numpy()[some], turn[some]


class PlaceWriter:
    """Collects positions of rows in any order, for as many rows as there are."""

    def __init__(
        self, scratch: Path, folder: str, parts: Sequence[Part], most: int | None = None
    ) -> None:
        """Start with nothing.

        Args:
            scratch: an existing folder on this machine.
            folder: where the files of places are written, which tasks can read.
            most: places of a work item; a part with more of them gives several. None: as many as a
                part has rows usually, so that a task holds about one more copy of a part.
        """
        self._folder, self._parts, self._most = folder, parts, most
        self._firsts = np.cumsum([0, *(part.rows for part in parts)])
        self._width = max(_PARTS_OF_FILE, -(-len(parts) // _MOST_FILES))
        self._edges = self._firsts[: -1 : self._width][1:]
        self._runs = Runs(scratch, -(-len(parts) // self._width), _PLACE)
        self._waiting: list[np.ndarray] = []

    def add(self, row: np.ndarray, position: np.ndarray) -> None:
        """Add (m,) int64 positions of (m,) row numbers that count through the parts."""
        for start in range(0, len(row), _BUFFERED):
            some = slice(start, start + _BUFFERED)
            places = np.empty(len(row[some]), _PLACE)
            places["row"], places["position"] = row[some], position[some]
            self._waiting.append(places)
            if sum(map(len, self._waiting)) >= _BUFFERED:
                self._flush()

    def finish(self) -> list[PartPlaces]:
        """Write the files of places; a work item for each part that has any, in their order."""
        self._flush()
        runs = enumerate(self._runs.read())
        return [item for number, places in runs for item in self._written(number, places)]

    def _flush(self) -> None:
        places = np.concatenate([np.empty(0, _PLACE), *self._waiting])
        self._waiting = []
        self._runs.add(places, np.searchsorted(self._edges, places["row"], side="right"))

    def _written(self, number: int, places: np.ndarray) -> list[PartPlaces]:
        if not len(places):
            return []
        places = places[np.argsort(places["row"], kind="stable")]
        first = number * self._width
        parts = self._parts[first : first + self._width]
        firsts = self._firsts[first : first + len(parts) + 1]
        part = np.searchsorted(firsts, places["row"], side="right") - 1
        table = pa.table(
            {
                "row": (places["row"] - firsts[part]).astype(np.int32),
                "position": np.ascontiguousarray(places["position"]),
            }
        )
        counts = np.bincount(part, minlength=len(parts)).tolist()
        digest = xxhash.xxh3_128(repr(counts).encode())
        for column in table.columns:
            digest.update(column.to_numpy().tobytes())
        path = join(self._folder, "places", f"{digest.hexdigest()}.arrow")
        write_buckets(path, table, part, len(parts))
        return [
            PartPlaces(parts[inside], path, inside, start, min(start + step, count))
            for inside, count in enumerate(counts)
            for step in [self._most or max(parts[inside].rows, ROWS_PER_PART)]
            for start in range(0, count, step)
        ]

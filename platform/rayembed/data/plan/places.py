"""Places of rows in a plan, given to the tasks that read the rows by files in the storage.

Rows are drawn in the order of steps and read in the order of parts. In between they stand in runs
on this machine's disk, and a run is sorted by itself: memory does not grow with the rows.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.storage import join
from rayembed.data.engine.parts import ROWS_PER_PART, Part
from rayembed.data.engine.shuffle import read_bucket, write_buckets

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

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(m,) int64 row numbers of the part, ascending, and (m,) int64 positions, those of a row
        in the order in which they were added.

        Raises:
            ArtifactError: the file is missing or broken.
        """
        table = self._of_part().slice(self.first, self.last - self.first)
        return table["row"].to_numpy().astype(np.int64), table["position"].to_numpy()

    def turns(self) -> np.ndarray:
        """(m,) int64: for each place of `read`, how many places of its row were added earlier."""
        row = self._of_part()["row"].to_numpy()
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        turn = np.arange(len(row)) - np.repeat(starts, np.diff(starts, append=len(row)))
        return np.asarray(turn[self.first : self.last], np.int64)

    def _of_part(self) -> pa.Table:
        (table,) = read_bucket([self.file], self.number)
        assert table is not None
        return table


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
        self._scratch, self._folder, self._parts, self._most = scratch, folder, parts, most
        self._firsts = np.cumsum([0, *(part.rows for part in parts)])
        self._width = max(_PARTS_OF_FILE, -(-len(parts) // _MOST_FILES))
        self._runs = -(-len(parts) // self._width)
        self._edges = self._firsts[: -1 : self._width][1:]
        self._buffer = np.empty(_BUFFERED, _PLACE)
        self._filled = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            names = (self._scratch / f"places-{number}" for number in range(self._runs))
            self._files = [stack.enter_context(name.open("w+b")) for name in names]
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def add(self, row: np.ndarray, position: np.ndarray) -> None:
        """Add (m,) int64 positions of (m,) row numbers that count through the parts."""
        for start in range(0, len(row), _BUFFERED):
            some = slice(start, start + _BUFFERED)
            count = len(row[some])
            if self._filled + count > _BUFFERED:
                self._flush()
            filled = self._buffer[self._filled : self._filled + count]
            filled["row"], filled["position"] = row[some], position[some]
            self._filled += count

    def finish(self) -> list[PartPlaces]:
        """Write the files of places; a work item for each part that has any, in their order."""
        self._flush()
        return [item for number in range(self._runs) for item in self._written(number)]

    def _flush(self) -> None:
        places = self._buffer[: self._filled]
        run = np.searchsorted(self._edges, places["row"], side="right")
        order = np.argsort(run, kind="stable")
        edges = np.searchsorted(run[order], np.arange(self._runs + 1))
        ordered = places[order]
        for number in np.flatnonzero(np.diff(edges)).tolist():
            self._files[number].write(ordered[edges[number] : edges[number + 1]].tobytes())
        self._filled = 0

    def _written(self, number: int) -> list[PartPlaces]:
        file = self._files[number]
        file.seek(0)
        places = np.frombuffer(file.read(), _PLACE)
        places = places[np.argsort(places["row"], kind="stable")]
        file.truncate(0)
        if not len(places):
            return []
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

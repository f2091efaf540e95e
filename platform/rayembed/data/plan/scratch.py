"""Sort and look up data larger than memory, such as row positions, in temporary files on this
machine's disk.

Rows of a plan are drawn in the order of steps and read in the order of parts. In between their
places stand in runs, and a run is sorted by itself: memory does not grow with the rows.
"""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from filelock import FileLock, Timeout

from rayembed.assets.storage import join
from rayembed.data.engine.index import PartIndex
from rayembed.data.engine.parts import ROWS_PER_PART, Part
from rayembed.data.engine.shuffle import read_bucket, write_buckets
from rayembed.errors import StorageFullError

_PREFIX = "rayembed-rows-"


@contextmanager
def scratch_folder(what: str, size: int) -> Iterator[Path]:
    """Create an empty folder below `TMPDIR` for the block, and remove it at the end.

    Args:
        what: what it is for, in an error.
        size: bytes that it will hold at most, approximately.

    Raises:
        StorageFullError: there is less room; before anything is written, as a file that is mapped
            into memory has no way to tell later.
    """
    place = Path(tempfile.gettempdir())
    _sweep(place)
    free = shutil.disk_usage(place).free
    if free < size:
        raise StorageFullError(
            f"{what} needs {size:,} bytes of temporary disk space on this machine, but "
            f"{str(place)!r} has only {free:,} bytes free. Free some space there, or set TMPDIR "
            "to a folder on a larger local disk"
        )
    folder = place / f"{_PREFIX}{uuid.uuid4().hex}"
    with _locked(folder):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock file next to a folder while the folder is used, so that other processes do not
    delete it.

    Raises:
        Timeout: another process holds it.
    """
    lock = folder.with_suffix(".lock")
    with FileLock(lock, timeout=0):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _sweep(place: Path) -> None:
    """Remove scratch folders that killed processes left, recognised by their free lock."""
    for folder in (path for path in place.glob(f"{_PREFIX}*") if path.is_dir()):
        try:
            with _locked(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except (Timeout, OSError):  # it lives, or is another user's
            continue


def mapped(path: Path, count: int, dtype: Any) -> np.ndarray:
    """Make a memory-mapped file of `count` zeros."""
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "w+", shape=(count,)))


ROWS_OF_RUN = 1 << 17
"""Number of rows that are sorted together: some 15 MB."""

_MOST_RUNS = 512
"""Maximum number of files that are open together; beyond 67 million rows runs become longer."""


def num_runs(num_rows: int) -> int:
    """Number of files to divide rows into for sorting: about `ROWS_OF_RUN` rows in each file, or
    more if there are very many rows.
    """
    return min(max(1, -(-num_rows // ROWS_OF_RUN)), _MOST_RUNS)


def run_of_hash(hashes: np.ndarray, count: int) -> np.ndarray:
    """(n,) file number of each of (n,) int64 hashes, such that a lower file number means a lower
    hash.
    """
    # The highest bits of the hash with its sign turned.
    high = (hashes.view(np.uint64) ^ np.uint64(1 << 63)) >> np.uint64(32)
    run: np.ndarray = ((high * np.uint64(count)) >> np.uint64(32)).astype(np.int64)
    return run


class Runs:
    """Rows divided into files, which are sorted one by one because all rows may not fit in
    memory.
    """

    def __init__(self, folder: Path, count: int, dtype: np.dtype[Any]) -> None:
        """Create empty files for the rows.

        Args:
            folder: an existing one.
            count: number of runs.
            dtype: of the rows.
        """
        self.count, self._dtype = count, dtype
        self._paths = [folder / f"run-{number}" for number in range(count)]
        self._files = [path.open("wb") for path in self._paths]

    def add(self, rows: np.ndarray, run: np.ndarray) -> None:
        """Append each row to the file that `run` names for it."""
        order = np.argsort(run, kind="stable")
        edges = np.searchsorted(run[order], np.arange(self.count + 1))
        rows = rows[order]
        for number in np.flatnonzero(np.diff(edges)).tolist():
            self._files[number].write(rows[edges[number] : edges[number + 1]].tobytes())

    def read(self) -> Iterator[np.ndarray]:
        """Yield the rows of each file in the order in which they were added, and delete the
        file.
        """
        for file in self._files:
            file.close()
        for path in self._paths:
            rows = np.fromfile(path, self._dtype)
            path.unlink()
            yield rows


_RUN = np.dtype([("id", "<i8"), ("query", "<i8"), ("language", "<i8"), ("place", "<i8")])


@dataclass(frozen=True)
class SortedRows:
    """Rows sorted by language and within a language by the hash of their id, then by row number."""

    place: np.ndarray
    """(n,) int64 or int32 global row numbers, counted through the parts; mapped."""
    query_hash: np.ndarray
    """(n,) int64 hash of the queries' texts; mapped."""
    rows_of: Mapping[int, int]
    """Language hash → number of its rows, ascending."""


def sorted_rows(
    scratch: Path,
    chunks: Iterator[tuple[PartIndex, np.ndarray, np.ndarray]],
    num_rows: int,
    kept: Callable[[], Mapping[int, int]],
) -> SortedRows:
    """Sort rows within bounded memory, with 44 bytes of `scratch` for each row meanwhile.

    They are cut by the first bits of their id's hash into as many files as it takes, and each is
    sorted by itself. 12 bytes a row stay in files that are mapped into memory, so that the system
    holds of them what there is room for.

    Args:
        scratch: an empty folder.
        chunks: index of some rows, mask of those to sort and (rows,) int64 by what they are grouped
            first, in the order of the places.
        num_rows: of all chunks.
        kept: called after the last chunk: groups that stay and the rows of each.
    """
    runs = Runs(scratch, num_runs(num_rows), _RUN)
    first = 0
    for index, mask, group in chunks:
        chosen = np.flatnonzero(mask)
        rows = np.empty(len(chosen), _RUN)
        rows["id"], rows["query"] = index.id_hash[chosen], index.query_hash[chosen]
        rows["language"], rows["place"] = group[chosen], first + chosen
        runs.add(rows, run_of_hash(rows["id"], runs.count))
        first += len(mask)
    rows_of = dict(sorted(kept().items()))
    total = sum(rows_of.values())
    small = np.int32 if num_rows < 2**31 else np.int64
    place = mapped(scratch / "place", total, small)
    query = mapped(scratch / "query", total, np.int64)
    languages = np.array(list(rows_of), np.int64)
    sizes = np.array(list(rows_of.values()), np.int64)
    ends = np.cumsum(sizes) - sizes
    for run in runs.read():
        group = np.searchsorted(languages, run["language"])
        stays = np.flatnonzero(np.isin(run["language"], languages))
        # Rows of a run are in the order of their places, which a stable sort keeps.
        order = stays[np.lexsort((run["id"][stays], group[stays]))]
        rows, group = run[order], group[order]
        counts = np.bincount(group, minlength=len(languages))
        starts = np.cumsum(counts) - counts
        to = ends[group] + np.arange(len(rows)) - starts[group]
        place[to], query[to] = rows["place"], rows["query"]
        ends += counts
    return SortedRows(place, query, rows_of)


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
    """Work item: a Parquet part, and the file with the positions of its rows in the plan; a row may
    have several.
    """

    part: Part
    file: str
    """Path of the positions of several parts."""
    number: int
    """Index of the part among these."""
    first: int
    """First and end index of the selected positions."""
    last: int

    @property
    def key(self) -> str:
        """Unique name from the part and the file of positions, which is named by its content."""
        named = f"{self.file.rpartition('/')[2]}-{self.number}-{self.first}"
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(named.encode())}"

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read (m,) int64 row numbers within the part, ascending, their (m,) int64 positions, and
        (m,) int64 how many positions of the same row come earlier.

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
    """Collects the plan positions of rows in any order and number, and writes them to files part by
    part.
    """

    def __init__(
        self, scratch: Path, folder: str, parts: Sequence[Part], most: int | None = None
    ) -> None:
        """Start without positions.

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
        """Add (m,) int64 positions of (m,) rows, whose numbers count through all parts."""
        for start in range(0, len(row), _BUFFERED):
            some = slice(start, start + _BUFFERED)
            places = np.empty(len(row[some]), _PLACE)
            places["row"], places["position"] = row[some], position[some]
            self._waiting.append(places)
            if sum(map(len, self._waiting)) >= _BUFFERED:
                self._flush()

    def finish(self) -> list[PartPlaces]:
        """Write the files of positions, and return a work item for each part that has any."""
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

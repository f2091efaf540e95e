"""Scratch space on this machine's disk for what does not fit in memory."""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from rayembed.data.engine.index import PartIndex
from rayembed.errors import StorageFullError

_PREFIX = "rayembed-rows-"


@contextmanager
def scratch_folder(what: str, size: int) -> Iterator[Path]:
    """An empty folder below `TMPDIR`, which is removed at the end.

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
            f"{what} takes {size:,} bytes of scratch on the disk of this machine, and "
            f"{str(place)!r} has {free:,} free. Make room there, or set TMPDIR to a folder on a "
            "larger local disk"
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
    """Hold the lock of a folder, which is there as long as the folder and stands beside it: another
    process that looks whether anybody holds it can put nothing into the folder.

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
    """Remove the folders of processes that were killed, whose locks nobody holds."""
    for folder in (path for path in place.glob(f"{_PREFIX}*") if path.is_dir()):
        try:
            with _locked(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except (Timeout, OSError):  # it lives, or is another user's
            continue


def mapped(path: Path, count: int, dtype: Any) -> np.ndarray:
    """(count,) zeros in a file that is mapped into memory."""
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "w+", shape=(count,)))


ROWS_OF_RUN = 1 << 17
"""Rows that are sorted at a time: some 15 MB."""

_MOST_RUNS = 512
"""Files that are open at a time, at most; beyond 67 million rows runs become longer."""


def num_runs(num_rows: int) -> int:
    """Number of runs of some `ROWS_OF_RUN` rows each, or longer ones of very many."""
    return min(max(1, -(-num_rows // ROWS_OF_RUN)), _MOST_RUNS)


def run_of_hash(hashes: np.ndarray, count: int) -> np.ndarray:
    """(n,) run of each of (n,) int64 hashes by its first bits, so that runs are in their order."""
    # The highest bits of the hash with its sign turned.
    high = (hashes.view(np.uint64) ^ np.uint64(1 << 63)) >> np.uint64(32)
    run: np.ndarray = ((high * np.uint64(count)) >> np.uint64(32)).astype(np.int64)
    return run


class Runs:
    """Rows cut into files that can be sorted one by one, as all together may not fit in memory."""

    def __init__(self, folder: Path, count: int, dtype: np.dtype[Any]) -> None:
        """Start with nothing.

        Args:
            folder: an existing one.
            count: number of runs.
            dtype: of the rows.
        """
        self.count, self._dtype = count, dtype
        self._paths = [folder / f"run-{number}" for number in range(count)]
        self._files = [path.open("wb") for path in self._paths]

    def add(self, rows: np.ndarray, run: np.ndarray) -> None:
        """Write each row to its run, of (rows,) numbers."""
        order = np.argsort(run, kind="stable")
        edges = np.searchsorted(run[order], np.arange(self.count + 1))
        rows = rows[order]
        for number in np.flatnonzero(np.diff(edges)).tolist():
            self._files[number].write(rows[edges[number] : edges[number + 1]].tobytes())

    def read(self) -> Iterator[np.ndarray]:
        """Rows of each run in the order in which they came; its file is removed."""
        for file in self._files:
            file.close()
        for path in self._paths:
            rows = np.fromfile(path, self._dtype)
            path.unlink()
            yield rows


_RUN = np.dtype([("id", "<i8"), ("query", "<i8"), ("language", "<i8"), ("place", "<i8")])


@dataclass(frozen=True)
class SortedRows:
    """Rows by language, and within a language by the hash of their id; equal ones by place."""

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
    """Sort rows within bounded memory; 44 bytes a row of `scratch` are used on the way.

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

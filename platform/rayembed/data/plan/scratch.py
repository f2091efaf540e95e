"""Scratch space on this machine's disk for what does not fit in memory."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

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

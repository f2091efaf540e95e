"""Scratch space on this machine's disk for what does not fit in memory."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from rayembed.errors import StorageFullError

_PREFIX = "rayembed-scratch-"
_LOCK = "lock"


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
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, FileLock(Path(folder, _LOCK)):
        free = shutil.disk_usage(folder).free
        if free < size:
            raise StorageFullError(
                f"{what} takes {size:,} bytes of scratch on the disk of this machine, and "
                f"{tempfile.gettempdir()!r} has {free:,} free. Make room there, or set TMPDIR to "
                "a folder on a larger local disk"
            )
        yield Path(folder)


def _sweep(place: Path) -> None:
    """Remove the folders of processes that were killed, whose locks nobody holds."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with FileLock(lock, timeout=0):
                shutil.rmtree(lock.parent, ignore_errors=True)
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

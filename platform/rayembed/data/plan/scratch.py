"""Scratch space on this machine's disk for what does not fit in memory."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayembed.errors import StorageFullError


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
    with tempfile.TemporaryDirectory(prefix="rayembed-") as folder:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise StorageFullError(
                f"{what} takes {size:,} bytes of scratch on the disk of this machine, and "
                f"{tempfile.gettempdir()!r} has {free:,} free. Make room there, or set TMPDIR to "
                "a folder on a larger local disk"
            )
        yield Path(folder)

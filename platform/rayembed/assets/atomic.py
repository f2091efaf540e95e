"""Atomic writes of local files: a temporary file beside the target, renamed over it.

A process that is killed leaves its temporary file. The next process that writes into the folder
removes it once it is old: a writer holds a lock on its file until it has its name, and of a dead
one nobody does. Some shared file systems show a lock to its own machine only, so age counts, too.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

STALE_SECONDS = 3600.0
"""Age from which a file that a writer left half-written is stale, and from which an unfinished
folder counts as left by a job that has ended."""

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")


def write_beside(target: Path, content: BinaryIO) -> None:
    """Write a file so that readers see the old content or the new, never a part.

    Missing folders are made; the content is on disk when the file has its name.

    Raises:
        OSError: the file system refuses it. Nothing of the file stays behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(target.parent, os.getpid())
    handle, name = _temporary(target)
    try:
        with os.fdopen(handle, "wb") as file:
            # mkstemp makes 0600; results are for everyone whom the umask lets in.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            shutil.copyfileobj(content, file)
            file.flush()
            os.fsync(file.fileno())
            Path(name).replace(target)  # while the lock is held
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@lru_cache(maxsize=10_000)
def remove_unfinished(folder: Path, _process: int) -> None:
    """Remove temporary files in a folder that killed writers left and that were not written to for
    `STALE_SECONDS`; once a process and folder.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                # Where locks are not possible, nothing is removed.
                with suppress(OSError), Path(entry.path).open("r+b") as file:
                    if time.time() - os.fstat(file.fileno()).st_mtime < STALE_SECONDS:
                        continue
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(entry.path).unlink()


def _temporary(target: Path) -> tuple[int, str]:
    """A locked temporary file beside the target: its descriptor and path."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process took it for a dead one's before it was locked


def _umask() -> int:
    """File mode mask of this process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask

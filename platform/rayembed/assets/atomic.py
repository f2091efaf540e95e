"""Atomic writes of local files: a temporary file next to the target is renamed over it.

A process that is killed leaves its temporary file. The next process that writes into the folder
removes it once it is old: a writer holds a lock on its file until it has its name, and of a dead
one nobody does. Some shared file systems show a lock to its own machine only, so age counts, too.

Disks and quotas that are full are told by `storage` of what it writes; other libraries write inside
`room_for`.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from rayembed.errors import StorageFullError

STALE_SECONDS = 3600.0
"""Age in seconds from which an unfinished file or folder counts as left by a writer that has ended.
"""

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")


def write_beside(target: Path, content: BinaryIO) -> None:
    """Write a file atomically, so that readers see the old content or the new, never a partly
    written file.

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
    """Remove temporary files that killed writers left unchanged for `STALE_SECONDS`; runs once for
    each process and folder.
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
    """Create a locked temporary file next to the target; return its descriptor and path."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process took it for a dead one's before it was locked


def _umask() -> int:
    """Return this process's file mode mask, which the system reveals only when it is set."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_for(path: str | Path, otherwise: str = "") -> Iterator[None]:
    """Raise StorageFullError when a write in the block fails for lack of disk space; other errors
    pass.

    Args:
        path: what is written, which the error names.
        otherwise: what helps beside making room, as "or set X to a folder on another disk".

    Raises:
        StorageFullError: there is no room, or the user's quota is used up.
    """
    try:
        yield
    except StorageFullError:
        raise
    except Exception as error:  # what libraries in Rust raise has no other class
        if not is_full(error):
            raise
        raise full(path, error, otherwise=otherwise) from error


def full(
    path: str | Path, error: Exception, *, kept: str = "", otherwise: str = ""
) -> StorageFullError:
    """Build the error for a write that failed for lack of space; it states the free bytes of a
    local disk.

    Args:
        kept: what is left of the file, behind a dot.
        otherwise: as of `room_for`.
    """
    room = "the quota is used up"
    if "://" not in str(path) and not _has_number(error, errno.EDQUOT):
        place = Path(path).expanduser().absolute()
        found = next(folder for folder in (place, *place.parents) if folder.exists())
        room = f"{shutil.disk_usage(found).free:,} bytes are free there"
    return StorageFullError(
        f"there is no room to write {str(path)!r}: {error}; {room}{kept}. Make room"
        f"{otherwise and ' '}{otherwise}, then give the same command again: it goes on from what "
        "is finished"
    )


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full or the user's quota is used up."""
    return isinstance(error, StorageFullError) or any(_has_number(error, n) for n in _FULL)


def _has_number(error: BaseException, number: int) -> bool:
    """Whether an error, or its text, has the given operating system error number."""
    # Libraries in Rust (safetensors, tokenizers) tell it in their text alone, and so do errors that
    # were made of others, and programs.
    told = str(error)
    named = f"(os error {number})" in told or f"[Errno {number}]" in told
    return named or getattr(error, "errno", None) == number

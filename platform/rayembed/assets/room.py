"""Disks and quotas that are full: how libraries say so, and what the user is told.

What is written by `storage` is told by it. Other libraries write inside `room_for`.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayembed.errors import StorageFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_for(path: str | Path, otherwise: str = "") -> Iterator[None]:
    """Tell a disk that fills up inside the block, whatever library writes there and however it says
    so; other errors pass.

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
    """Error for a write that failed for lack of space, with the free bytes beside a local path.

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
    """Whether a write failed for lack of space: on the disk or in the user's quota."""
    return isinstance(error, StorageFullError) or any(_has_number(error, n) for n in _FULL)


def _has_number(error: BaseException, number: int) -> bool:
    """Whether an error is of a number of the system's."""
    # Libraries in Rust (safetensors, tokenizers) tell it in their text alone, and so do errors that
    # were made of others, and programs.
    told = str(error)
    named = f"(os error {number})" in told or f"[Errno {number}]" in told
    return named or getattr(error, "errno", None) == number

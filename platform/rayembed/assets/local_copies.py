"""Local copies of files in object storage, for work that reads files many times.

A copy is named by path, size and time of the last write of its original, so that a file that was
made anew is copied anew. Files are copied as long as a fifth of the disk stays free, and read in
place beyond that: what is read in turn again and again would only push itself out of a full cache.
Copies that nobody has read for days are removed.
"""

import logging
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import xxhash

from rayembed.assets.cache import cache_folder, filled, is_complete, mark_used, remove_unused
from rayembed.assets.storage import file_name, is_remote, open_storage, read_bytes
from rayembed.errors import ArtifactError, AssetError, StorageError, StorageFullError

log = logging.getLogger(__name__)

Read = TypeVar("Read")

LEFT_FREE = 0.2
"""Share of the disk that copies must leave free."""

UNUSED_SECONDS = 3 * 24 * 3600.0
"""Seconds without a reader after which a copy is removed."""


def read_copied(path: str, read: Callable[[str], Read]) -> Read:
    """Call `read` with the path of a local file, or of a remote file's copy on this
    machine.

    A copy that `read` cannot use is removed, and the original read in its place.

    Args:
        read: is given a path; it raises ArtifactError or StorageError for a broken file.
    """
    copy = _copy_of(path) if is_remote(path) else None
    if copy is not None:
        try:
            return read(str(copy))
        except (ArtifactError, StorageError) as error:
            log.warning(
                "the local copy of %s is damaged (%s): removing the copy and reading the original",
                path,
                error,
            )
            copy.unlink(missing_ok=True)
    return read(path)


def _copy_of(path: str) -> Path | None:
    """Return the path of a remote file's local copy, made if the disk has space; None if there is
    no copy.
    """
    filesystem, inside = open_storage(path)
    try:
        info = filesystem.get_file_info(inside)
    except OSError:  # whoever reads the file says so
        return None
    if info.size is None:
        return None
    digest = xxhash.xxh3_128_hexdigest(f"{path}\0{info.size}\0{info.mtime_ns}".encode())
    folder, name = cache_folder() / "copies", file_name(path)
    entry = folder / digest

    def fill(made: Path) -> None:
        (made / name).write_bytes(read_bytes(path))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _without_unused(folder)
        if not is_complete(entry):
            disk = shutil.disk_usage(folder)
            if disk.free - info.size < LEFT_FREE * disk.total:
                return None
        files = filled(entry, fill)
        mark_used(entry)
    except (OSError, AssetError, StorageFullError) as error:
        _say_once(f"files of object storage are not copied to {str(folder)!r}: {error}")
        return None
    return files / name


@lru_cache
def _without_unused(folder: Path) -> None:
    """Remove copies that have not been used for long, once for each process."""
    remove_unused(folder, UNUSED_SECONDS, keep=folder)


@lru_cache
def _say_once(message: str) -> None:
    log.warning("%s", message)

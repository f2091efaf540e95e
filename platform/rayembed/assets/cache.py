"""Cache folder of downloaded and converted assets; its entries are atomic.

An entry is filled in a folder beside its place and renamed into it under a lock, so that a killed
process leaves no half entry and two processes fill it once. Its manifest lists every file with
its size, or with its digest where the content is compared; an entry that does not agree with its
manifest is filled again.
"""

import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from rayembed.assets.atomic import room_for
from rayembed.errors import AssetError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "RAYEMBED_CACHE"
_MANIFEST = "manifest.json"
_FILES = "files"


def cache_folder(cache: Path | None = None) -> Path:
    """Absolute path of the asset cache: `cache`, else `$RAYEMBED_CACHE`, else `~/.cache/rayembed`;
    it may not exist yet.
    """
    if cache is None:
        cache = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rayembed")
    return Path(cache).expanduser().absolute()


def filled(entry: Path, fill: Callable[[Path], None], *, checked: bool = False) -> Path:
    """Return the folder of a cache entry's files; if they are missing, `fill` writes them
    first.

    Args:
        entry: place of the entry; its name is all that tells entries apart.
        fill: writes the files; when it raises, nothing of the entry stays.
        checked: whether each call reads the files whole and compares their digests, so that one
            with a flipped bit is never used: for what scores or identities depend on. Other entries
            are compared by the sizes of their files.

    Raises:
        AssetError: the cache cannot be written, or `entry` is no place for an entry.
        StorageFullError: it has no room for the entry.
    """
    if ".." in entry.parts:
        raise AssetError(
            f"refusing to use {str(entry)!r} as an entry of the asset cache, because the path "
            "contains '..'; no file was changed"
        )
    if is_complete(entry, checked=checked):
        return entry / _FILES
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(entry.parent / f".{entry.name}.lock"))
        with lock:
            if not is_complete(entry, checked=checked):
                with room_for(entry, f"or set {CACHE_VARIABLE} to a folder on another disk"):
                    _replace(entry, fill, checked)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise AssetError(
            f"cannot write the asset cache {str(entry.parent)!r}: {error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return entry / _FILES


def mark_used(entry: Path) -> None:
    """Record that an entry is used now, so that `remove_unused` keeps it."""
    with suppress(OSError):  # a cache of somebody else's
        os.utime(entry / _MANIFEST)


def remove_unused(folder: Path, seconds: float, keep: Path) -> None:
    """Remove the entries of a folder that have not been used for a number of seconds.

    A process that has mapped files of one keeps what it has; one that asks again fills it again.

    Args:
        keep: entry that stays however old it is.
    """
    for manifest in folder.glob(f"*/{_MANIFEST}"):
        entry = manifest.parent
        try:
            with FileLock(str(folder / f".{entry.name}.lock"), timeout=0):
                if entry != keep and manifest.stat().st_mtime < time.time() - seconds:
                    gone = Path(tempfile.mkdtemp(prefix=f".{entry.name}.partial-", dir=folder))
                    entry.rename(gone / entry.name)  # whole, so that nobody meets a part of it
                    shutil.rmtree(gone)
        except (FileNotFoundError, Timeout):  # another process was first, or fills it
            continue


def is_complete(entry: Path, *, checked: bool = False) -> bool:
    """Whether all files in an entry's manifest exist with the recorded size, or with `checked` the
    recorded content.
    """
    try:
        listed = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all(_told(entry / _FILES / name, checked) == was for name, was in listed.items())
    except (OSError, ValueError):
        return False


def _told(file: Path, checked: bool) -> int | str:
    """Value of a file in the manifest: its size in bytes, or its xxh3-128 digest if `checked`."""
    if not checked:
        return file.stat().st_size
    with file.open("rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


def _replace(entry: Path, fill: Callable[[Path], None], checked: bool) -> None:
    """Fill a temporary folder next to the entry and rename it to the entry; the caller holds the
    entry's lock.
    """
    for abandoned in entry.parent.glob(f".{glob.escape(entry.name)}.partial-*"):
        shutil.rmtree(abandoned)
    if os.path.lexists(entry):
        _check_is_ours(entry)
        logger.warning(
            "the cached asset %s is incomplete or damaged, so rayembed creates it again", entry
        )
        shutil.rmtree(entry)
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.partial-", dir=entry.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes 0700; a cache may be shared between users
        files = partial / _FILES
        files.mkdir()
        fill(files)
        listed = {
            path.relative_to(files).as_posix(): _told(path, checked)
            for path in sorted(files.rglob("*"))
            if path.is_file()
        }
        (partial / _MANIFEST).write_text(json.dumps(listed, indent=1), encoding="utf-8")
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_is_ours(entry: Path) -> None:
    """Raise unless the path holds a cache entry, whole or damaged, so that no other folder is
    overwritten.
    """
    ours = entry.is_dir() and not entry.is_symlink()
    if not ours or {path.name for path in entry.iterdir()} - {_MANIFEST, _FILES}:
        raise AssetError(
            f"{str(entry)!r} is not an entry of the asset cache, but the cache needs this path "
            "for an entry. Nothing was removed: move the file or folder away, or set "
            f"{CACHE_VARIABLE} to a folder that only the cache uses"
        )

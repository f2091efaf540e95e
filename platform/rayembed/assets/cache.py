"""Cache folder of downloaded and converted assets; its entries are atomic.

An entry is filled in a folder beside its place and renamed into it under a lock, so that a killed
process leaves no half entry and two processes fill it once. Its manifest lists every file with
its size; an entry that does not agree with its manifest is filled again.
"""

import glob
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rayembed.errors import AssetError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "RAYEMBED_CACHE"
_MANIFEST = "manifest.json"
_FILES = "files"


def cache_folder(cache: Path | None = None) -> Path:
    """`cache`, or `$RAYEMBED_CACHE`, or `~/.cache/rayembed`, absolute; may not exist yet."""
    if cache is None:
        cache = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rayembed")
    return Path(cache).expanduser().absolute()


def filled(entry: Path, fill: Callable[[Path], None]) -> Path:
    """Folder with the entry's files; `fill` is called with an empty folder if they are missing.

    Args:
        entry: place of the entry; its name is all that tells entries apart.
        fill: writes the files; when it raises, nothing of the entry stays.

    Raises:
        AssetError: the cache cannot be written.
    """
    if is_complete(entry):
        return entry / _FILES
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(entry.parent / f".{entry.name}.lock"))
        with lock:
            if not is_complete(entry):
                _replace(entry, fill)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise AssetError(
            f"cannot write the asset cache {str(entry.parent)!r}: {error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return entry / _FILES


def mark_used(entry: Path) -> None:
    """Note that an entry is used now, for `remove_unused`."""
    with suppress(OSError):  # a cache of somebody else's
        os.utime(entry / _MANIFEST)


def remove_unused(folder: Path, seconds: float, keep: Path) -> None:
    """Remove the entries of a folder that were used last more than so many seconds ago.

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


def is_complete(entry: Path) -> bool:
    """Whether every file in the entry's manifest exists with its size."""
    try:
        sizes = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all((entry / _FILES / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _replace(entry: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside the entry and rename it; the caller holds the entry's lock."""
    for abandoned in entry.parent.glob(f".{glob.escape(entry.name)}.partial-*"):
        shutil.rmtree(abandoned)
    if entry.exists():
        logger.warning("cached asset %s is incomplete and is made again", entry)
        shutil.rmtree(entry)
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.partial-", dir=entry.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes 0700; a cache may be shared between users
        files = partial / _FILES
        files.mkdir()
        fill(files)
        sizes = {
            path.relative_to(files).as_posix(): path.stat().st_size
            for path in sorted(files.rglob("*"))
            if path.is_file()
        }
        (partial / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise

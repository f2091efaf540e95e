"""Assets in object storage: cached locally, updated when an object changes."""

import hashlib
import json
from pathlib import Path, PurePosixPath

import pyarrow
import pyarrow.fs

from rayembed.assets.cache import filled
from rayembed.assets.names import check_inside
from rayembed.assets.storage import open_storage
from rayembed.errors import AssetError


def fetch_from_object_storage(reference: str, cache: Path) -> Path:
    """Copy the file or folder of an `s3://` or `gs://` reference into the cache.

    Raises:
        AssetError: nothing there, not reachable, or a copy of another size.
    """
    filesystem, inside = open_storage(reference)
    return copy_to_cache(reference, filesystem, inside.rstrip("/"), cache)


def copy_to_cache(
    reference: str, filesystem: pyarrow.fs.FileSystem, inside: str, cache: Path
) -> Path:
    """Local copy of `inside`, a file or a folder of `filesystem`.

    The cache entry is named by the reference and by path, size and time of every object, so a
    changed object is copied again. `reference` stands in errors.

    Raises:
        AssetError: nothing there, not reachable, or a copy of another size.
    """
    objects = _list(reference, filesystem, inside)
    listing = json.dumps([reference, sorted(objects.items())])
    key = hashlib.sha256(listing.encode()).hexdigest()[:16]
    name = check_inside(PurePosixPath(inside).name, f"the reference {reference!r}")
    entry = cache / "objects" / f"{name}-{key}"

    def fill(folder: Path) -> None:
        if "" not in objects:
            (folder / name).mkdir()  # pyarrow makes it only for a folder that has folders
        try:
            pyarrow.fs.copy_files(
                inside,
                str(folder / name),
                source_filesystem=filesystem,
                destination_filesystem=pyarrow.fs.LocalFileSystem(),
            )
        except (OSError, pyarrow.ArrowException) as error:
            raise AssetError(f"cannot copy the asset {reference!r}: {error}") from error
        for path, (size, _) in objects.items():
            copied = folder / name / path if path else folder / name
            if not copied.is_file() or copied.stat().st_size != size:
                raise AssetError(
                    f"the copy of {path or name!r} of {reference!r} should have {size} bytes"
                )

    return filled(entry, fill) / name


def _list(
    reference: str, filesystem: pyarrow.fs.FileSystem, inside: str
) -> dict[str, tuple[int, int]]:
    """Size in bytes and time in nanoseconds of each file, by its path below `inside`."""
    try:
        info = filesystem.get_file_info(inside)
        if info.type == pyarrow.fs.FileType.File:
            return {"": (info.size, info.mtime_ns or 0)}
        selector = pyarrow.fs.FileSelector(inside, recursive=True, allow_not_found=True)
        infos = filesystem.get_file_info(selector)
    except (OSError, pyarrow.ArrowException) as error:
        raise AssetError(f"cannot reach the asset {reference!r}: {error}") from error
    found: dict[str, tuple[int, int]] = {}
    for item in infos:
        if item.type != pyarrow.fs.FileType.File:
            continue
        path = PurePosixPath(item.path).relative_to(inside)
        if ".." in path.parts:
            raise AssetError(f"the object {item.path!r} of {reference!r} leaves its folder")
        found[path.as_posix()] = (item.size, item.mtime_ns or 0)
    if not found:
        raise AssetError(f"there is no file at {reference!r}; check bucket, path and credentials")
    return found

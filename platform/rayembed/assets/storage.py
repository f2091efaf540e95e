"""Files on local disk, S3 or GCS under one interface, through pyarrow's filesystems.

Credentials, regions and endpoints come from where pyarrow takes them: the environment
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, …), the machine's role,
or the URI's query (`s3://bucket/path?endpoint_override=…`). How long each request may take stands
in `clients`.
"""

import ctypes
import io
import os
import posixpath
import uuid
from pathlib import Path
from typing import BinaryIO

import pyarrow
import pyarrow.fs

from rayembed.assets import clients
from rayembed.assets.atomic import full, is_full, room_for, write_beside
from rayembed.assets.clients import read_with_retries, split_address, split_options, why
from rayembed.assets.names import check_inside
from rayembed.config.credentials import check_address
from rayembed.errors import ArtifactError, PlacementError, StorageError, StorageFullError

_REMOTE = ("s3", "gs")
_ENDPOINTS = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"}
_COPIED_AT_ONCE = 64 << 20
"""Chunk size of copies in bytes."""


def is_remote(path: str) -> bool:
    """Whether `path` is in object storage.

    Raises:
        ConfigError: it is an address with a password, key or token.
        PlacementError: a scheme that is not known.
    """
    if ":" in path:
        check_address(path, "the address of a storage")
    scheme, separator, _ = path.partition("://")
    if separator and scheme not in _REMOTE:
        raise PlacementError(
            f"storage {path!r} has the scheme {scheme!r}; allowed: a local path, s3://, gs://"
        )
    return bool(separator)


def open_storage(path: str | Path) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the filesystem that holds `path`, and the path within it (absolute for local
    paths).

    Raises:
        PlacementError: an unknown scheme, or a URI that pyarrow cannot read.
    """
    text = str(path)
    if not is_remote(text):
        return pyarrow.fs.LocalFileSystem(), str(Path(text).expanduser().absolute())
    _check_endpoints()
    try:
        return clients.connect(text)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise PlacementError(f"cannot open the storage {text!r}: {error}") from error


def open_storage_for_ray(path: str | Path) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return a filesystem that Ray can pickle for its workers, and the path within it; see
    `open_storage`.

    A client forgets in its pickle how often it tries, and would then wait as long as ours does for
    each of pyarrow's 30 tries; so this one is as pyarrow makes it.
    """
    if not is_remote(str(path)):
        return open_storage(path)
    _check_endpoints()
    try:
        root, inside = split_address(str(path))
        filesystem, _ = pyarrow.fs.FileSystem.from_uri(root)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise PlacementError(f"cannot open the storage {str(path)!r}: {error}") from error
    return filesystem, inside


def _check_endpoints() -> None:
    """Check the storage addresses in environment variables that the storage's client reads."""
    for name in _ENDPOINTS & os.environ.keys():
        check_address(os.environ[name], f"the environment variable {name}")


def join(path: str | Path, *parts: str) -> str:
    """Append `parts` to `path`, separated by '/'; an address keeps its scheme and its options."""
    base, options = _without_options(path)
    cleaned = [part.strip("/") for part in parts if part.strip("/")]
    return posixpath.join(base.rstrip("/") or "/", *cleaned) + options


def below(root: str, path: str) -> str:
    """Join a relative `path` to `root`; return other paths unchanged, and all paths if `root` is
    empty.

    Addresses, absolute paths and those of a home folder, `~/…`, are what they are.
    """
    whole = not root or "://" in path or path.startswith(("/", "~"))
    return path if whole else join(root, path)


def file_name(path: str | Path) -> str:
    """Last part of a file's or folder's path, without the options of an address."""
    return posixpath.basename(_without_options(path)[0].rstrip("/"))


def _without_options(path: str | Path) -> tuple[str, str]:
    return split_options(str(path)) if "://" in str(path) else (str(path), "")


def with_ending(path: str | Path, ending: str) -> str:
    """Replace the ending of `path`, from the last dot of its name, by another; an address keeps its
    options.
    """
    base, options = _without_options(path)
    return posixpath.splitext(base)[0] + ending + options


def exists(path: str | Path) -> bool:
    """Whether a file or folder exists (in object storage: a key or a prefix).

    Raises:
        StorageError: the storage does not tell.
    """
    filesystem, inside = open_storage(path)
    try:
        return bool(filesystem.get_file_info(inside).type != pyarrow.fs.FileType.NotFound)
    except OSError as error:
        raise StorageError(f"cannot check whether {str(path)!r} exists: {why(error)}") from error


def read_bytes(path: str | Path, remedy: str = "") -> bytes:
    """Read the whole content of a file.

    Args:
        remedy: what to do where the file is missing, a whole sentence.

    Raises:
        ArtifactError: no such file.
        StorageError: the storage does not give it.
    """
    filesystem, inside = open_storage(path)

    def read() -> bytes:
        with filesystem.open_input_stream(inside) as stream:
            return bytes(stream.read())

    try:
        return read_with_retries(read)
    except OSError as error:
        kind = unreadable(error)
        behind = f". {remedy}" if remedy and kind is ArtifactError else ""
        raise kind(f"cannot read {str(path)!r}: {why(error)}{behind}") from error


def unreadable(error: Exception) -> type[ArtifactError]:
    """Error class for a failed read: ArtifactError if the file is missing, StorageError if the
    storage failed.
    """
    there = isinstance(error, OSError) and not isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError
    )
    return StorageError if there else ArtifactError


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never a partly
    written file.

    Locally: a file beside it, flushed to disk and renamed. In object storage a key appears when
    its upload is complete; one that an exception or a signal cuts off is never completed. Missing
    folders are made.

    Raises:
        StorageFullError: there is no room for it.
        StorageError: the storage refuses it or does not answer.
    """
    _write(path, io.BytesIO(data))


def store_file(source: Path, path: str | Path) -> None:
    """Copy a local file to `path` atomically, without holding it in memory.

    Raises:
        StorageError: as `write_atomic`, or the file cannot be read.
    """
    try:
        with source.open("rb") as content:
            _write(path, content)
    except OSError as error:
        raise StorageError(f"cannot read {str(source)!r}: {error}") from error


def _write(path: str | Path, content: BinaryIO) -> None:
    filesystem, inside = open_storage(path)
    try:
        if is_remote(str(path)):
            _upload(filesystem, inside, content)
        else:
            write_beside(Path(inside), content)
    except OSError as error:
        raise refused(path, error) from error


def _upload(
    filesystem: pyarrow.fs.FileSystem, inside: str, content: BinaryIO | pyarrow.NativeFile
) -> None:
    """Write the content to the path `inside`; if that fails, an existing file there keeps its
    content.
    """
    opened: list[pyarrow.NativeFile] = []
    try:
        # In one call: an interrupt between opening and naming the stream would destroy it.
        opened.extend(map(filesystem.open_output_stream, [inside]))
        while piece := content.read(_COPIED_AT_ONCE):
            opened[0].write(piece)
        opened[0].close()
    except BaseException:
        # A stream completes its upload when it is closed, which its destructor does too, and knows
        # no way to give it up. It must live as long as the process does. Parts that were sent wait
        # in the bucket, unseen, for its rule on incomplete uploads, as those of a killed process.
        for stream in opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
        raise


def refused(path: str | Path, error: OSError) -> StorageError:
    """Build the error for a failed write: storage full, or refused for another reason."""
    if is_full(error):
        return full(path, error, kept=". Nothing of the file stays behind")
    return StorageError(
        f"cannot write {str(path)!r}: {why(error)}. Correct the storage or the rights there, "
        "then give the same command again: it goes on from what is finished"
    )


def upload_folder(folder: Path, path: str | Path) -> None:
    """Copy all files below a local folder to `path`, replacing existing ones.

    Raises:
        ArtifactError: the folder holds no file.
        StorageError: the storage refuses them.
    """
    files = sorted(item for item in folder.rglob("*") if item.is_file())
    if not files:
        raise ArtifactError(f"the folder {str(folder)!r} has no files to copy to {str(path)!r}")
    try:
        for file in files:
            store_file(file, join(path, file.relative_to(folder).as_posix()))
    except StorageFullError:
        raise
    except StorageError as error:
        raise StorageError(f"cannot copy {str(folder)!r} to {str(path)!r}: {error}") from error


def download_folder(path: str, folder: Path) -> None:
    """Download all files below `path` into an existing folder below `TMPDIR`.

    Raises:
        ArtifactError: there is nothing at `path`.
        StorageError: the storage does not give them.
        StorageFullError: the local disk has no room for them.
    """
    filesystem, inside = open_storage(path)
    file_sizes(path, recursive=True)  # names of objects may lead out of the local folder

    def copy() -> None:
        pyarrow.fs.copy_files(
            inside,
            str(folder),
            source_filesystem=filesystem,
            destination_filesystem=pyarrow.fs.LocalFileSystem(),
        )

    with room_for(folder, "or set TMPDIR to a folder on another disk"):
        try:
            read_with_retries(copy)
        except OSError as error:
            told = f"cannot copy {path!r} to {str(folder)!r}: {why(error)}"
            raise unreadable(error)(told) from error


def list_files(path: str | Path, *, recursive: bool) -> list[str]:
    """Sorted relative paths of the files below a folder; empty if it does not exist.

    Raises:
        StorageError: the storage cannot be read.
    """
    return sorted(file_sizes(path, recursive=recursive))


def file_sizes(path: str | Path, *, recursive: bool) -> dict[str, int]:
    """Map the relative path of each file below a folder to its size in bytes; empty for a missing
    folder.

    Raises:
        StorageError: the storage cannot be read.
    """
    found = _files(path, recursive=recursive)
    return {name: int(info.size) for name, info in found.items()}


def file_times(path: str | Path) -> dict[str, int]:
    """Map each file in a folder to its last write in ns of the storage's clock; empty for a missing
    folder.

    Raises:
        StorageError: the storage cannot be read.
    """
    found = _files(path, recursive=False)
    return {name: int(info.mtime_ns) for name, info in found.items()}


def _files(path: str | Path, *, recursive: bool) -> dict[str, pyarrow.fs.FileInfo]:
    filesystem, inside = open_storage(path)
    inside = inside.rstrip("/")
    selector = pyarrow.fs.FileSelector(inside, recursive=recursive, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except OSError as error:
        raise StorageError(f"cannot list {str(path)!r}: {why(error)}") from error
    files = [info for info in infos if info.type == pyarrow.fs.FileType.File]
    named = {info.path[len(inside) :].lstrip("/"): info for info in files}
    for name in filter(None, named):
        check_inside(name, f"the listing of {str(path)!r}")
    return named


def move_file(source: str, target: str) -> None:
    """Move a file within a storage; readers see either no file or the whole file at the new
    path.

    Locally it is renamed. Object storage knows no renaming and copies on its own side only what is
    small, so it is read and written in pieces, and removed when the copy is complete.

    Raises:
        StorageError: there is no such file, or the storage refuses it.
    """
    filesystem, start = open_storage(source)
    end = open_storage(target)[1]
    try:
        if not is_remote(target):
            Path(end).parent.mkdir(parents=True, exist_ok=True)
            Path(start).replace(end)
            return
        with filesystem.open_input_stream(start) as content:
            _upload(filesystem, end, content)
        filesystem.delete_file(start)
    except OSError as error:
        raise StorageError(f"cannot move {source!r} to {target!r}: {why(error)}") from error


def remove_file(path: str | Path) -> None:
    """Remove a file.

    Raises:
        StorageError: the storage refuses it.
    """
    filesystem, inside = open_storage(path)
    try:
        filesystem.delete_file(inside)
    except OSError as error:
        raise StorageError(f"cannot remove {str(path)!r}: {why(error)}") from error


def remove_folder(path: str | Path) -> None:
    """Remove everything at or below `path`.

    Raises:
        StorageError: the storage refuses it.
    """
    filesystem, inside = open_storage(path)
    try:
        filesystem.delete_dir(inside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot remove {str(path)!r}: {why(error)}") from error


def check_writable(path: str | Path) -> None:
    """Check that files can be written, read and removed below `path`; creates the folder.

    Raises:
        PlacementError: it cannot; the message has the storage's own reason.
    """
    filesystem, inside = open_storage(path)
    probe = join(inside, f".rayembed-probe-{uuid.uuid4().hex}")
    try:
        if not is_remote(str(path)):
            Path(inside).mkdir(parents=True, exist_ok=True)
        with filesystem.open_output_stream(probe) as stream:
            stream.write(b"probe")
        with filesystem.open_input_stream(probe) as stream:
            seen = bytes(stream.read())
        filesystem.delete_file(probe)
    except OSError as error:
        raise PlacementError(
            f"placement.storage_path {str(path)!r} cannot be written: {why(error)}. Choose a "
            "folder or a bucket that this machine may write to"
        ) from error
    if seen != b"probe":
        raise PlacementError(
            f"placement.storage_path {str(path)!r} does not return what was written: wrote the "
            f"test file b'probe', but read {seen!r}. Choose another folder or bucket"
        )

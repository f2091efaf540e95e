"""NumPy arrays in files that end with a checksum of their content.

Their form is NumPy's own, `.npy` and `.npz`; what follows it is not looked at by other readers. A
digest in a file of its own could be that of another writer of the same name.
"""

import io
import mmap
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from rayembed.assets.storage import read_bytes, write_atomic
from rayembed.errors import ArtifactError

_ONE_AT_A_TIME = threading.Lock()
"""Lock for reading headers with NumPy: it has Python parse them, of which two threads at a time end
in a SystemError now and then (CPython's issue 106905; seen with 3.11.7)."""

REMEDY = "Remove the file and start the job again, which writes the file again"


def save_array(path: str, array: np.ndarray) -> None:
    """Write an array as `.npy` with a checksum at the end; raises the same errors as
    `write_atomic`.
    """
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    _write(path, buffer)


def load_array(path: str, remedy: str = REMEDY) -> np.ndarray:
    """Load an array written by `save_array`.

    Args:
        remedy: what to do where the file is missing or broken.

    Raises:
        ArtifactError: the file is missing, or not what was written.
        StorageError: the storage does not give it.
    """
    file = _unsealed(path, remedy)
    with _told(path, remedy), _ONE_AT_A_TIME:
        return np.asarray(np.load(file))


def map_array(path: Path, remedy: str = REMEDY) -> np.ndarray:
    """Memory-map a local file written by `save_array`; the system may drop its pages from memory at
    any time. The file is read whole once, to be checked.

    Args:
        remedy: as of `load_array`.

    Raises:
        ArtifactError: as `load_array`.
    """
    with _told(str(path), remedy):
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as at,
                memoryview(at) as view,
                view[:-SEAL_BYTES] as content,
            ):
                check_seal(content, bytes(view[-SEAL_BYTES:]))
        except FileNotFoundError as error:
            raise ArtifactError(f"the file {str(path)!r} is missing. {remedy}") from error
        with _ONE_AT_A_TIME:
            array: np.ndarray = np.load(path, mmap_mode="r")
        return array


def save_arrays(path: str, **arrays: np.ndarray) -> None:
    """Write named arrays as one `.npz` with a checksum at the end; raises the same errors as
    `write_atomic`.
    """
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    _write(path, buffer)


def load_arrays(path: str, remedy: str = REMEDY) -> dict[str, np.ndarray]:
    """Load arrays written by `save_arrays`, by name; raises the same errors as `load_array`."""
    file = _unsealed(path, remedy)
    with _told(path, remedy), _ONE_AT_A_TIME, np.load(file) as loaded:
        return dict(loaded)


def _write(path: str, buffer: io.BytesIO) -> None:
    content = buffer.getvalue()
    write_atomic(path, content + seal_of(content))


def _unsealed(path: str, remedy: str) -> io.BytesIO:
    """Read a file, verify the checksum at its end, and return the content before it; raises the
    same errors as `load_array`.
    """
    view = memoryview(read_bytes(path, remedy))
    with _told(path, remedy):
        check_seal(view[:-SEAL_BYTES], view[-SEAL_BYTES:])
    return io.BytesIO(view[:-SEAL_BYTES])


@contextmanager
def _told(path: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"the file {path!r} is broken: {error}. {remedy}") from error


_MARK = b"xxh3-128"

SEAL_BYTES = len(_MARK) + 16


def is_seal(content: bytes | memoryview) -> bool:
    """Whether bytes start with the fixed mark of a seal, which is the checksum at the end of a
    file.
    """
    return bytes(content[: len(_MARK)]) == _MARK


def seal_of(content: bytes | memoryview) -> bytes:
    """Compute the seal of some content: a fixed mark followed by the content's xxh3-128
    checksum.
    """
    return _MARK + xxhash.xxh3_128_digest(content)


def check_seal(content: bytes | memoryview, seal: bytes | memoryview) -> None:
    """Raise unless the seal holds the checksum of the content.

    Raises:
        ValueError: it is not, so a bit of either has changed; or there is none.
    """
    if not is_seal(seal):
        raise ValueError(
            "the checksum that rayembed writes into each file is missing, so the file is cut off "
            "or another program wrote it"
        )
    if bytes(seal) != seal_of(content):
        raise ValueError(
            "the checksum does not match the content, which has changed since the file was written"
        )

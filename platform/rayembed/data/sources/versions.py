"""Versions of files, and whether a file is still the one that a job has looked at.

Folders of records are named by what their files held at the look. What is written to a file after
that must not come in under the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.fs
import xxhash

from rayembed.assets.storage import is_remote, open_storage
from rayembed.errors import DataError

if TYPE_CHECKING:
    from rayembed.data.sources.files import FilePiece

_LOOKED_AT_ONCE = 16


def content_version(filesystem: pyarrow.fs.FileSystem, inside: str) -> str:
    """Size and hash of a file's content."""
    digest, size = xxhash.xxh3_128(), 0
    with filesystem.open_input_stream(inside, compression=None) as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
            size += len(block)
    return f"{size}-{digest.hexdigest()}"


def version_of_texts(files: Sequence[tuple[str, str]]) -> str:
    """Version of a piece of texts, by name and version of each."""
    return xxhash.xxh3_128_hexdigest(repr([list(file) for file in files]).encode())


def state_of(path: str) -> str:
    """What changes whenever anyone writes to a file; of object storage its version."""
    filesystem, inside = open_storage(path)
    if is_remote(path):
        return state_there(filesystem.get_file_info(inside))
    found = Path(inside).stat()
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}-{found.st_ino}"


def state_there(found: pyarrow.fs.FileInfo) -> str:
    """Version of a file in object storage: size and time of the last write."""
    return f"{found.size}-{found.mtime_ns}"


def check_unchanged(piece: FilePiece) -> None:
    """Check that the files of a piece are what they were when they were listed.

    Where size, times or inode of a local file are others, as on a machine with a copy of its own,
    its content decides.

    Raises:
        DataError: one has changed.
    """
    if not piece.states:
        return
    files = piece.texts or ((piece.path, piece.name),)
    try:
        with ThreadPoolExecutor(min(len(files), _LOOKED_AT_ONCE)) as pool:
            states = tuple(pool.map(state_of, (path for path, _ in files)))
        if states == piece.states or _version_now(piece, states) == piece.version:
            return
    except FileNotFoundError:
        pass
    of = "a file of the texts from" if piece.texts else "the file"
    raise DataError(
        f"rows {piece.path!r}: {of} {piece.name!r} changed after this job had looked at it, and "
        "what is made of it would stand under the name of the former content. Start the job again, "
        "and let nothing write to the file while it runs"
    )


def _version_now(piece: FilePiece, states: Sequence[str]) -> str:
    if not piece.texts:
        return _version_in(piece.path, states[0])
    names = zip(piece.texts, states, strict=True)
    return version_of_texts([(name, _version_in(path, state)) for (path, name), state in names])


@lru_cache(maxsize=4096)
def _version_in(path: str, state: str) -> str:
    """Version of a file in this state; each process hashes it once."""
    return state if is_remote(path) else content_version(*open_storage(path))

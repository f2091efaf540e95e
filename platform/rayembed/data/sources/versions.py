"""Compute versions of files, and check that a file is unchanged since the job listed it.

Folders of records are named by what their files held at the look. What is written to a file after
that must not come in under the same name.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pyarrow.fs
import xxhash

from rayembed.assets.reading import open_source
from rayembed.assets.storage import is_remote, open_storage

_LOOKED_AT_ONCE = 16


def content_version(filesystem: pyarrow.fs.FileSystem, inside: str) -> str:
    """Return the size and the hash of a file's content, as its version."""
    digest, size = xxhash.xxh3_128(), 0
    with filesystem.open_input_stream(inside, compression=None) as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
            size += len(block)
    return f"{size}-{digest.hexdigest()}"


def version_of_texts(files: Sequence[tuple[str, str]]) -> str:
    """Combine the names and versions of several text files into one version."""
    return xxhash.xxh3_128_hexdigest(repr([list(file) for file in files]).encode())


def state_of(path: str) -> str:
    """Return a quick state of a file that changes with every write: size, times and inode, or the
    object's size and time.
    """
    filesystem, inside = open_storage(path)
    if is_remote(path):
        return state_there(filesystem.get_file_info(inside))
    found = Path(inside).stat()
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}-{found.st_ino}"


def state_there(found: pyarrow.fs.FileInfo) -> str:
    """Read the version of a file in object storage: size and time of the last write."""
    return f"{found.size}-{found.mtime_ns}"


def is_unchanged(
    path: str, texts: Sequence[tuple[str, str]], states: Sequence[str], version: str
) -> bool:
    """Whether the files of a piece are unchanged since they were listed.

    Where size, times or inode of a local file are others, as on a machine with a copy of its own,
    its content decides.

    Args:
        path, texts, states, version: of the `FilePiece`.
    """
    try:
        now = states_now(path, texts)
        if now == tuple(states):
            return True
        paths = [one for one, _ in texts] or [path]
        versions = [version_in(*one) for one in zip(paths, now, strict=True)]
    except FileNotFoundError:
        return False
    names = [name for _, name in texts]
    found = version_of_texts(list(zip(names, versions, strict=True))) if texts else versions[0]
    return found == version


def states_now(path: str, texts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """State of each file of a piece.

    Args:
        path, texts: of the `FilePiece`.
    """
    paths = [one for one, _ in texts] or [path]
    with ThreadPoolExecutor(min(len(paths), _LOOKED_AT_ONCE)) as pool:
        return tuple(pool.map(state_of, paths))


@lru_cache(maxsize=4096)
def version_in(path: str, state: str) -> str:
    """Return the version of a file in the given state (empty if it cannot change); content is
    hashed once by each process.
    """
    return state if state and is_remote(path) else content_version(*open_source(path))

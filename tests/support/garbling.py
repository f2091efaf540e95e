"""Files that are read with a bit changed or without their end, and what the errors advise."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest

from rayembed.errors import ArtifactError, StorageError


class Garbling:
    """A local filesystem that gives files of some names with one bit changed, or cut off."""

    def __init__(self, pattern: str, damage: str, seed: str) -> None:
        self.pattern, self.damage, self.seed = re.compile(pattern), damage, seed
        self.seen: set[str] = set()
        self._real = pyarrow.fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def open_input_file(self, path: str) -> Any:
        return self._garbled(path) or self._real.open_input_file(path)

    def open_input_stream(self, path: str, **options: Any) -> Any:
        return self._garbled(path) or self._real.open_input_stream(path, **options)

    def _garbled(self, path: str) -> Any:
        if not self.pattern.search(path):
            return None
        self.seen.add(path)
        place = self.seed + Path(path).name
        return pa.BufferReader(damaged(Path(path).read_bytes(), self.damage, place))


def damaged(content: bytes, damage: str, seed: str) -> bytes:
    """The content with a bit changed (`flip`) or without its end (`cut`), at a seeded place."""
    rng = random.Random(seed)
    if damage == "cut":
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    bit = rng.randrange(8 * len(content))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@contextmanager
def garbled(pattern: str, damage: str, seed: str = "") -> Iterator[Garbling]:
    """Garble what is read of local files whose path matches."""
    garbling = Garbling(pattern, damage, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyarrow.fs, "LocalFileSystem", lambda: garbling)
        yield garbling


def check_garbled(
    pattern: str, damage: str, job: Callable[[], Any], wanted: Any, seed: str = ""
) -> bool:
    """Check what a job makes of garbled files: what it made before, or an error that names the file
    and what to do, which helps. Whether it was refused.
    """
    with garbled(pattern, damage, seed) as garbling:
        try:
            made = job()
            error = None
        except ArtifactError as raised:
            error = raised
    assert garbling.seen, "the job reads no such file"
    if error is None:
        assert damage == "flip", "a part of a file is never the whole"
        assert made == wanted
        return False
    assert any(repr(path) in str(error) for path in garbling.seen), error
    assert not isinstance(error, StorageError), "no later try helps"
    follow(error)
    assert job() == wanted
    return True


def follow(error: ArtifactError) -> None:
    """Do what an error advises."""
    text = str(error)
    if found := re.search(r"Remove the folder '([^']+)'", text):
        shutil.rmtree(found[1])
        return
    assert re.search(r"Remove (it|the file|this file alone) and start", text), text
    named = [Path(name) for name in re.findall(r"'([^']+)'", text)]
    (file,) = {path for path in named if path.is_file()}
    file.unlink()

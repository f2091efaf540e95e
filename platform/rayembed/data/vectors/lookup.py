"""Look up teachers' vectors of texts while training, in memory-mapped files on the worker's
machine.

Vectors in object storage are copied into the cache of assets first, once for each machine. U
distinct texts of a step, T width of the teacher.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from rayembed.assets.array_files import SEAL_BYTES, check_seal, load_array, map_array, save_array
from rayembed.assets.cache import cache_folder, filled, is_complete
from rayembed.assets.names import check_inside
from rayembed.assets.storage import file_name, is_remote, join, open_storage, read_bytes
from rayembed.config.types import Role
from rayembed.data.engine.artifacts import open_artifact, root_of
from rayembed.errors import ArtifactError, AssetError, DataError


@dataclass(frozen=True)
class TextIndex:
    """Index that maps each of N texts to the file and the row of its vector, 16 bytes per text."""

    text_hash: np.ndarray
    """(N,) int64, ascending."""
    file: np.ndarray
    """(N,) int32 index of the file."""
    row: np.ndarray
    """(N,) int32 row in the file."""

    @classmethod
    def of(cls, files: Iterable[tuple[int, np.ndarray]]) -> "TextIndex":
        """Build the index of vector files from the hashes of their rows; a text in several files is
        found in the first.

        Args:
            files: number of each file and (rows,) int64 hashes.
        """
        numbers, hashes = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        rows = [np.empty(0, np.int32)]
        for number, some in files:
            hashes.append(some)
            numbers.append(np.full(len(some), number, np.int32))
            rows.append(np.arange(len(some), dtype=np.int32))
        distinct, first = np.unique(np.concatenate(hashes), return_index=True)
        return cls(distinct, np.concatenate(numbers)[first], np.concatenate(rows)[first])

    def find(self, text_hash: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) int64 positions of texts in the index, valid only where the returned (n,) bool mask
        is set.
        """
        if not len(self.text_hash):
            return np.zeros(len(text_hash), np.int64), np.zeros(len(text_hash), bool)
        places = np.searchsorted(self.text_hash, text_hash).clip(max=len(self.text_hash) - 1)
        return places, np.asarray(self.text_hash[places] == text_hash)

    def by_file(self, places: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Group positions by file: yield the file's number, the indices into `places`, and the rows
        in the file.
        """
        numbers = np.asarray(self.file[places])
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for some in np.split(order, starts[1:]) if len(order) else ():
            yield int(numbers[some[0]]), some, np.asarray(self.row[places[some]])

    @classmethod
    def files(cls, name: str) -> list[str]:
        """File names of an index, one for each array."""
        return [f"{name}.{part}.npy" for part in cls.__dataclass_fields__]

    def save(self, folder: str, name: str) -> None:
        """Write the arrays as files below a folder, with a common prefix."""
        for file, array in zip(self.files(name), vars(self).values(), strict=True):
            save_array(join(folder, file), array)

    @classmethod
    def load(cls, folder: str, name: str) -> "TextIndex":
        """Read the arrays that `save` wrote; raises the same errors as `load_array`."""
        return cls(*(load_array(join(folder, file)) for file in cls.files(name)))

    @classmethod
    def mapped(cls, folder: Path, name: str) -> "TextIndex":
        """Memory-map the arrays that `save` wrote, on this machine's disk; raises the same errors
        as `load_array`.
        """
        return cls(*(map_array(folder / file) for file in cls.files(name)))


KIND: Final = "teacher_vectors"
"""Kind of the folder, see `artifacts`."""

CODE_VERSION = 1
"""Version of its layout; raise it when the same inputs yield another."""

ROLES: tuple[Role, ...] = ("query", "document")

_COPIED_AT_ONCE = 8
_OPEN_FILES = 1024
"""Maximum number of memory-mapped files: a process may map 65,530 of them, and not for itself
alone."""


@dataclass(frozen=True)
class TeacherVectorLookup:
    """One teacher's vectors of all texts of a stage, looked up by text hash. Picklable; opens its
    files when they are read.
    """

    folder: str
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str) -> "TeacherVectorLookup":
        """Open the vectors in a finished folder.

        Raises:
            ArtifactError: there is none, or a broken one.
        """
        return cls(folder, open_artifact(folder).manifest)

    @property
    def width(self) -> int:
        """Width T of the vectors."""
        return int(self.manifest["width"])

    def __call__(self, texts: Sequence[tuple[Role, int]]) -> np.ndarray:
        """Look up the (U, T) float16 unit vectors of texts by role and hash.

        Raises:
            DataError: a text has none.
            ArtifactError: a file is missing or broken.
        """
        found = np.empty((len(texts), self.width), np.float16)
        for role in ROLES:
            wanted = np.flatnonzero([of == role for of, _ in texts])
            hashes = np.array([one for of, one in texts if of == role], dtype=np.int64)
            index = self._indexes[role]
            places, there = index.find(hashes)
            if not there.all():
                raise DataError(
                    f"the vectors of the teacher {self.manifest['teacher']!r} in {self.folder!r} "
                    f"lack {int((~there).sum())} of the {len(there)} {role} texts of a step, "
                    "because they were computed for other rows. Remove that folder and start the "
                    "job again, which computes the vectors again"
                )
            for number, some, rows in index.by_file(places):
                found[wanted[some]] = self._mapped(role, number)[rows]
        if not np.isfinite(found).all():
            raise ArtifactError(
                f"vectors of the teacher {self.manifest['teacher']!r} in {self.folder!r} hold NaN "
                "or infinity. Remove that folder and this teacher's folder below data/vectors, "
                "and start the job again"
            )
        return found

    def fetch(self) -> None:
        """Copy the files into this machine's cache if they are in object storage.

        Raises:
            ArtifactError: a file is missing or broken.
            AssetError: the cache has no room, or cannot be written.
        """
        _ = self._data

    @cached_property
    def _data(self) -> Path:
        """Return the folder on this machine to which the files' paths are relative; files in object
        storage are copied there first.
        """
        data = root_of(self.folder)
        if not is_remote(data):
            return Path(open_storage(data)[1])
        digest = hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()
        entry = cache_folder() / KIND / f"{file_name(self.folder)}-{digest[:16]}"
        if not is_complete(entry):
            self._check_room(entry)
        return filled(entry, lambda target: self._copy(data, target))

    def _copy(self, data: str, target: Path) -> None:
        def copy(relative: str) -> None:
            content = memoryview(read_bytes(join(data, relative)))
            try:
                check_seal(content[:-SEAL_BYTES], content[-SEAL_BYTES:])
            except ValueError as error:
                raise ArtifactError(
                    f"the file {join(data, relative)!r} is broken: {error}. Remove it and the "
                    f"folder {self.folder!r}, and start the job again"
                ) from error
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

        own = f"{KIND}/{file_name(self.folder)}"
        indexes = [f"{own}/{name}" for role in ROLES for name in TextIndex.files(role)]
        with ThreadPoolExecutor(_COPIED_AT_ONCE) as pool:
            list(pool.map(copy, [*indexes, *(path for path, _ in self._files)]))

    def _check_room(self, entry: Path) -> None:
        needed = sum(size for _, size in self._files)
        there = next(folder for folder in entry.parents if folder.exists())
        if (free := shutil.disk_usage(there).free) < needed:
            raise AssetError(
                f"the vectors of the teacher {self.manifest['teacher']!r} need {needed:,} bytes "
                f"in the cache {str(cache_folder())!r} of this machine, but only {free:,} bytes "
                "are free there; free some space, or set RAYEMBED_CACHE to a folder on a larger "
                "disk"
            )

    @property
    def _files(self) -> list[tuple[str, int]]:
        """Path and size of each vector file, from the manifest."""
        files = [(path, size) for role in ROLES for path, size in self.manifest["files"][role]]
        for path, _ in files:
            check_inside(path, f"the manifest of {self.folder!r}")
        return files

    @cached_property
    def _indexes(self) -> dict[Role, TextIndex]:
        own = self._data / KIND / file_name(self.folder)
        return {role: TextIndex.mapped(own, role) for role in ROLES}

    @cached_property
    def _open(self) -> dict[str, np.ndarray]:
        return {}

    def _mapped(self, role: Role, number: int) -> np.ndarray:
        """Memory-map a vector file, which is read whole and checked when it is first opened."""
        relative = self.manifest["files"][role][number][0]
        check_inside(relative, f"the manifest of {self.folder!r}")
        if relative not in self._open:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[relative] = map_array(self._data / relative)
        return self._open[relative]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "manifest": self.manifest}

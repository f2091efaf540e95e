"""Where the vectors of texts lie: text hash → file and row, in arrays that can be mapped.

N distinct texts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayembed.assets.array_files import load_array, map_array, save_array
from rayembed.assets.storage import join


@dataclass(frozen=True)
class TextIndex:
    """Places of the vectors of N texts: 16 bytes a text."""

    text_hash: np.ndarray
    """(N,) int64, ascending."""
    file: np.ndarray
    """(N,) int32 number of the file."""
    row: np.ndarray
    """(N,) int32 row in the file."""

    @classmethod
    def of(cls, files: Iterable[tuple[int, np.ndarray]]) -> "TextIndex":
        """Index of files with the hashes of their rows; the first place of a text counts.

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
        """(n,) int64 places of texts in the arrays, and (n,) bool which of them are there."""
        if not len(self.text_hash):
            return np.zeros(len(text_hash), np.int64), np.zeros(len(text_hash), bool)
        places = np.searchsorted(self.text_hash, text_hash).clip(max=len(self.text_hash) - 1)
        return places, np.asarray(self.text_hash[places] == text_hash)

    def by_file(self, places: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Files that hold the vectors at these places: number, which of `places`, and their rows;
        each file once.
        """
        numbers = np.asarray(self.file[places])
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for some in np.split(order, starts[1:]) if len(order) else ():
            yield int(numbers[some[0]]), some, np.asarray(self.row[places[some]])

    @classmethod
    def files(cls, name: str) -> list[str]:
        """Names of the files of an index, one for each array."""
        return [f"{name}.{part}.npy" for part in cls.__dataclass_fields__]

    def save(self, folder: str, name: str) -> None:
        """Write the arrays below a folder, as files that begin with a name."""
        for file, array in zip(self.files(name), vars(self).values(), strict=True):
            save_array(join(folder, file), array)

    @classmethod
    def load(cls, folder: str, name: str) -> "TextIndex":
        """Read the arrays that `save` wrote; raises as `load_array`."""
        return cls(*(load_array(join(folder, file)) for file in cls.files(name)))

    @classmethod
    def mapped(cls, folder: Path, name: str) -> "TextIndex":
        """Map those in a folder on this machine's disk; raises as `load_array`."""
        return cls(*(map_array(folder / file) for file in cls.files(name)))

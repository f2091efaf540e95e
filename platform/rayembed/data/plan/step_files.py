"""Parquet files of a plan: the rows of a step lie together and can be read by slot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from rayembed.assets.arrow_files import Footers, parquet_bytes, read_sealed
from rayembed.assets.storage import exists, file_sizes, join, read_bytes, write_atomic
from rayembed.data.parts import remedy
from rayembed.errors import ArtifactError

MANIFEST = "manifest.json"

FILES = "files"
"""Manifest key: name → size in bytes of each file of steps."""

ROWS_PER_GROUP = 64
"""Rows in a Parquet row group, the least that a worker reads: about 0.5 MB."""


@dataclass(frozen=True)
class StepFiles:
    """Finished plan files. Picklable; opened when they are read."""

    folder: str
    rows_per_step: int
    steps_per_file: int

    def read(self, step: int, first: int, last: int, names: Sequence[str]) -> pa.Table:
        """Columns of the slots `first` to `last` (exclusive) of a step.

        Raises:
            ArtifactError: a file is missing or broken.
            StorageError: the storage does not give it.
        """
        place = step % self.steps_per_file
        groups_per_step = -(-self.rows_per_step // ROWS_PER_GROUP)
        groups = range(first // ROWS_PER_GROUP, -(-last // ROWS_PER_GROUP))
        path = join(self.folder, file_name(step - place))
        table = read_sealed(
            path,
            ["step", "slot", *names],
            remedy=remedy(path),
            row_groups=[place * groups_per_step + group for group in groups],
            footers=self._footers,
        )
        table = table.slice(first - groups[0] * ROWS_PER_GROUP, last - first)
        slots = table["slot"].to_numpy()
        if not np.array_equal(slots, np.arange(first, last)) or set(table["step"].to_pylist()) != {
            step
        }:
            raise ArtifactError(
                f"the batch plan {path!r} does not hold step {step} where it must. {remedy(path)}"
            )
        return table.select(names)

    @cached_property
    def _footers(self) -> Footers:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_footers"}


def write_steps(folder: str, table: pa.Table, *, first_step: int, rows_per_step: int) -> str:
    """Write whole steps as one file, rows in their order; returns the file's name.

    Args:
        table: with the columns `step` and `slot`.
    """
    name = file_name(first_step)
    content = parquet_bytes(table, ROWS_PER_GROUP, rows_per_step)
    write_atomic(join(folder, name), content)
    return name


def write_manifest(folder: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest that finishes a plan, with the sizes of its files.

    Args:
        manifest: `num_steps` and `steps_per_file` among others.

    Raises:
        ArtifactError: a file is gone, of which an earlier try tells that it was written.
    """
    there = file_sizes(folder, recursive=False)
    firsts = range(0, manifest["num_steps"], manifest["steps_per_file"])
    sizes = {name: there.get(name) for name in map(file_name, firsts)}
    gone = [name for name, size in sizes.items() if size is None]
    if gone:
        raise ArtifactError(f"{join(folder, gone[0])!r} is gone. {remedy(join(folder, MANIFEST))}")
    content = json.dumps({**manifest, FILES: sizes}, indent=1, ensure_ascii=False)
    write_atomic(join(folder, MANIFEST), content.encode())


def read_manifest(folder: str, version: int, kind: str | None = None) -> dict[str, Any]:
    """Read the manifest of a finished plan.

    Raises:
        ArtifactError: there is no finished plan of this version and kind, or a broken one.
        StorageError: the storage does not tell.
    """
    path = join(folder, MANIFEST)
    if not exists(path):
        raise ArtifactError(f"there is no finished batch plan in {folder!r}: no {MANIFEST}")
    try:
        manifest = json.loads(read_bytes(path))
        if not isinstance(manifest, dict):
            raise ValueError("it must be an object")
    except ValueError as error:
        raise ArtifactError(f"the manifest {path!r} is broken: {error}. {remedy(path)}") from error
    if manifest.get("version") != version or manifest.get("kind") != kind:
        raise ArtifactError(
            f"the batch plan {folder!r} has the layout {manifest.get('version')!r}, this code "
            f"reads {version}, or is of another kind. {remedy(path)}"
        )
    return manifest


def check_files(folder: str, manifest: Mapping[str, Any]) -> None:
    """Check that all files of a finished plan exist with their recorded sizes.

    Raises:
        ArtifactError: one is not; the first is named.
        StorageError: the storage cannot be read.
    """
    there = file_sizes(folder, recursive=False)
    for name, size in manifest[FILES].items():
        if there.get(name) != size:
            seen = f"has {there[name]:,} of {size:,} bytes" if name in there else "is gone"
            path = join(folder, name)
            raise ArtifactError(f"the file {path!r} of the batch plan {seen}. {remedy(path)}")


def file_name(first_step: int) -> str:
    """Name of the file that starts with the step."""
    return f"steps-{first_step:09d}.parquet"

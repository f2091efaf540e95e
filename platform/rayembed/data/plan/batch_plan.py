"""The batch plan: contents of every global batch, fixed before training and stored in files.

The plan is independent of workers: worker r of W reads the slots [r·G/W, (r+1)·G/W) of each step,
so the batches are the same for every W, and training may resume at any step with another number of
workers. `write` makes it. G rows of a global batch. In the files the rows of a step lie together
and can be read by slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rayembed.assets.arrow_files import Footers, parquet_bytes, read_sealed
from rayembed.assets.json_files import read_json
from rayembed.assets.names import check_inside
from rayembed.assets.storage import exists, file_sizes, join, write_atomic
from rayembed.assets.store import MANIFEST, Entry
from rayembed.data.engine.artifacts import root_of
from rayembed.data.engine.parts import SCHEMA, remedy
from rayembed.data.records import Record
from rayembed.errors import ArtifactError, DataError

FILES = "files"
"""Manifest key: name → size in bytes of each file of steps."""

ROWS_PER_GROUP = 64
"""Minimum rows in a Parquet row group, the least that a worker reads: about 0.5 MB."""

GROUPS_PER_STEP = 64
"""Maximum row groups of a step: a large batch is cut as up to so many workers read it. More would
only make the footer longer, which each of them reads."""


@dataclass(frozen=True)
class StepFiles:
    """Finished files of a batch plan, from which a range of a step's rows can be read. Picklable;
    opened when they are read.
    """

    folder: str
    rows_per_step: int
    steps_per_file: int

    def read(self, step: int, first: int, last: int, names: Sequence[str]) -> pa.Table:
        """Read columns of the rows in slots `first` to `last` (exclusive) of a step.

        Raises:
            ArtifactError: a file is missing or broken.
            StorageError: the storage does not give it.
        """
        place = step % self.steps_per_file
        before = place * self.rows_per_step
        path = join(self.folder, file_name(step - place))
        table = read_sealed(
            path,
            ["step", "slot", *names],
            remedy=remedy(path),
            rows=range(before + first, before + last),
            footers=self._footers,
        )
        slots = table["slot"].to_numpy()
        if not np.array_equal(slots, np.arange(first, last)) or set(table["step"].to_pylist()) != {
            step
        }:
            raise ArtifactError(
                f"the file {path!r} of the batch plan does not contain the rows of step {step} at "
                f"the expected position. {remedy(path)}"
            )
        return table.drop_columns(["step", "slot"])

    @cached_property
    def _footers(self) -> Footers:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_footers"}


def write_steps(folder: str, table: pa.Table, *, first_step: int, rows_per_step: int) -> str:
    """Write whole steps as one file, with rows in their order; return the file's name.

    Args:
        table: with the columns `step` and `slot`.
    """
    name = file_name(first_step)
    rows_per_group = max(ROWS_PER_GROUP, -(-rows_per_step // GROUPS_PER_STEP))
    content = parquet_bytes(table, rows_per_group, rows_per_step, statistics=False)
    write_atomic(join(folder, name), content)
    return name


def finish(entry: Entry, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the manifest that completes a batch plan, with the sizes of its files.

    Args:
        manifest: `num_steps` and `steps_per_file` among others; `held_out` steps follow the last.

    Raises:
        ArtifactError: a file is gone, which an earlier try says that it wrote.
    """
    steps = manifest["num_steps"] + manifest.get("held_out", 0)
    names = [file_name(first) for first in range(0, steps, manifest["steps_per_file"])]
    return entry.finish({**manifest, FILES: entry.sizes(names)})


def read_manifest(folder: str, version: int, kind: str | None = None) -> dict[str, Any]:
    """Read the manifest of a finished batch plan.

    Raises:
        ArtifactError: there is no finished plan of this version and kind, or a broken one.
        StorageError: the storage does not tell.
    """
    path = join(folder, MANIFEST)
    if not exists(path):
        raise ArtifactError(
            f"there is no finished batch plan in {folder!r}: the file {MANIFEST} is missing"
        )
    manifest = read_json(path, remedy(path))
    if manifest.get("code") != version or manifest.get("kind") != kind:
        raise ArtifactError(
            f"the batch plan {folder!r} has another kind, or layout version "
            f"{manifest.get('code')!r} where this program reads version {version}. {remedy(path)}"
        )
    return manifest


def check_files(folder: str, manifest: Mapping[str, Any]) -> None:
    """Check that all files of a finished batch plan exist with their recorded sizes.

    Raises:
        ArtifactError: one is not; the first is named.
        StorageError: the storage cannot be read.
    """
    there = file_sizes(folder, recursive=False)
    for name, size in manifest[FILES].items():
        if there.get(name) != size:
            seen = f"has {there[name]:,} of {size:,} bytes" if name in there else "is missing"
            path = join(folder, name)
            raise ArtifactError(f"the file {path!r} of the batch plan {seen}. {remedy(path)}")


def file_name(first_step: int) -> str:
    """Name of the plan file whose first step is `first_step`."""
    return f"steps-{first_step:09d}.parquet"


CODE_VERSION = 1
"""Version of plans; raise it when the same records yield another plan or layout on disk."""


TRAINING = (
    "id",
    "query",
    "positives",
    *(f"negatives.list.element.{field}" for field in ("text", "score", "cross_score")),
    "dataset",
    "query_instruction",
    "document_instruction",
    "in_batch",
    "label",
    "positive_score",
    "false_negatives",
)
"""Columns that a training step reads, in addition to the plan's `OPTIONAL` ones."""


class Pair(NamedTuple):
    """Fields of a row that serve as an in-context example for other rows of its batch."""

    dataset: str
    query_instruction: str
    query: str
    positives: list[str]


@dataclass(frozen=True)
class BatchPlan:
    """A finished plan on disk. Picklable; opens its files when they are read."""

    folder: str
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str) -> "BatchPlan":
        """Open the plan in a folder (a local path, `s3://…` or `gs://…`).

        Raises:
            ArtifactError: no finished plan of this version there, or a broken one.
        """
        return cls(folder, read_manifest(folder, CODE_VERSION))

    @property
    def num_steps(self) -> int:
        """Number of steps in the plan."""
        return int(self.manifest["num_steps"])

    @property
    def global_pairs(self) -> int:
        """Number of rows (query-document pairs) in each step, over all workers."""
        return int(self.manifest["global_pairs"])

    @property
    def num_negatives(self) -> int:
        """Maximum number of hard negatives that a row of the plan has."""
        return int(self.manifest["num_negatives"])

    @property
    def fingerprint(self) -> str:
        """Content hash of all steps' rows in order and of the teachers, in hexadecimal digits."""
        return str(self.manifest["fingerprint"])

    @property
    def teachers(self) -> tuple[str, ...]:
        """Folders with the teachers' vectors of the rows' texts, in the order of the stage's
        teachers.

        They lie beside the plan in the same storage, also where both were moved together.
        """
        names = self.manifest["teachers"]
        vectors = join(root_of(self.folder), "data", "teacher_vectors")
        source = repr(join(self.folder, MANIFEST))
        return tuple(join(vectors, check_inside(name, source)) for name in names)

    def read(
        self,
        step: int,
        worker: int = 0,
        num_workers: int = 1,
        columns: Sequence[str] = SCHEMA.names,
    ) -> list[Record]:
        """Read the records of one worker in one step, in slot order.

        Args:
            columns: that are read, such as `TRAINING`; other fields have their defaults.

        Raises:
            DataError: no such step or worker, or the workers cannot share the batch equally.
            ArtifactError: a file of the plan is missing or broken.
        """
        if self.global_pairs % num_workers:
            raise DataError(
                f"{num_workers} workers cannot share batches of {self.global_pairs} pairs "
                f"equally; use a number of workers that divides {self.global_pairs}"
            )
        if not (0 <= step < self.num_steps and 0 <= worker < num_workers):
            raise DataError(
                f"the plan {self.folder!r} has steps 0 to {self.num_steps - 1}, but step {step} "
                f"was requested, for worker {worker} of {num_workers}"
            )
        rows = self.global_pairs // num_workers
        first, last = worker * rows, (worker + 1) * rows
        table = self._files.read(step, first, last, [*columns, *self.manifest["columns"]])
        return [Record.from_row(row) for row in table.to_pylist()]

    def read_pairs(self, step: int) -> list[Pair]:
        """Read the query and the positives of every row of a step, in slot order.

        Raises:
            ArtifactError: a file of the plan is missing or broken.
        """
        names = ["dataset", "query_instruction", "query", "positives"]
        rows = self._files.read(step, 0, self.global_pairs, names).to_pylist()
        return [
            Pair(r["dataset"], r["query_instruction"], r["query"], r["positives"]) for r in rows
        ]

    def query_instructions(self) -> set[tuple[str, str]]:
        """Return the distinct pairs of data set name and query instruction in the plan.

        Reads two columns of all files.

        Raises:
            ArtifactError: a file of the plan is missing or broken.
        """
        found: set[tuple[str, str]] = set()
        names = ["dataset", "query_instruction"]
        for first in range(0, self.num_steps, self._steps_per_file):
            path = join(self.folder, file_name(first))
            table = read_sealed(path, names, remedy=remedy(path))
            distinct = table.group_by(names).aggregate([])
            found |= set(zip(*(distinct[name].to_pylist() for name in names), strict=True))
        return found

    @property
    def _steps_per_file(self) -> int:
        return int(self.manifest["steps_per_file"])

    @cached_property
    def _files(self) -> StepFiles:
        return StepFiles(self.folder, self.global_pairs, self._steps_per_file)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "manifest": self.manifest}

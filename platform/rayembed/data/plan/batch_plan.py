"""The batch plan: contents of every global batch, fixed before training and stored in files.

The plan is independent of workers: worker r of W reads the slots [r·G/W, (r+1)·G/W) of each step,
so the batches are the same for every W, and training may resume at any step with another number of
workers. `write` makes it. G rows of a global batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

from rayembed.assets.arrow_files import read_sealed
from rayembed.assets.storage import join
from rayembed.data.parts import SCHEMA, remedy
from rayembed.data.plan.step_files import StepFiles, file_name, read_manifest
from rayembed.data.records import Record
from rayembed.errors import DataError

VERSION = 2
"""Version of the layout on disk; plans of another version are remade."""


class Pair(NamedTuple):
    """Parts of a row that other rows of its batch need."""

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
        return cls(folder, read_manifest(folder, VERSION))

    @property
    def num_steps(self) -> int:
        """Number of steps in the plan."""
        return int(self.manifest["num_steps"])

    @property
    def global_pairs(self) -> int:
        """Rows of each step, over all workers."""
        return int(self.manifest["global_pairs"])

    @property
    def num_negatives(self) -> int:
        """Maximum number of hard negatives of a row."""
        return int(self.manifest["num_negatives"])

    @property
    def fingerprint(self) -> str:
        """Content hash in hexadecimal digits: every row at its place."""
        return str(self.manifest["fingerprint"])

    def read(self, step: int, worker: int = 0, num_workers: int = 1) -> list[Record]:
        """Records of one worker in one step, in slot order.

        Raises:
            DataError: no such step or worker, or the workers cannot share the batch equally.
            ArtifactError: a file of the plan is missing or broken.
        """
        if self.global_pairs % num_workers:
            raise DataError(
                f"{num_workers} workers cannot share batches of {self.global_pairs} pairs equally; "
                f"take a number of workers that divides {self.global_pairs}"
            )
        if not (0 <= step < self.num_steps and 0 <= worker < num_workers):
            raise DataError(
                f"the plan {self.folder!r} has steps 0 to {self.num_steps - 1} and was asked for "
                f"step {step}, worker {worker} of {num_workers}"
            )
        rows = self.global_pairs // num_workers
        first, last = worker * rows, (worker + 1) * rows
        table = self._read(step, first, last, [*SCHEMA.names, *self.manifest.get("columns", ())])
        return [Record.from_row(row) for row in table.to_pylist()]

    def read_pairs(self, step: int) -> list[Pair]:
        """Query and first positive of every row of a step, in slot order.

        Raises:
            ArtifactError: a file of the plan is missing or broken.
        """
        names = ["dataset", "query_instruction", "query", "positives"]
        rows = self._read(step, 0, self.global_pairs, names).to_pylist()
        return [
            Pair(r["dataset"], r["query_instruction"], r["query"], r["positives"]) for r in rows
        ]

    def _read(self, step: int, first: int, last: int, names: Sequence[str]) -> pa.Table:
        """Columns of the slots `first` to `last` of a step."""
        return self._files.read(step, first, last, names)

    def query_instructions(self) -> set[tuple[str, str]]:
        """Distinct pairs of data set name and query instruction.

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

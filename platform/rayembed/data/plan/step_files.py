"""Parquet files of a plan, in which the rows of a step lie together and can be read by slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayembed.assets.arrow_files import open_parquet
from rayembed.assets.storage import join, open_storage, unreadable, write_atomic
from rayembed.errors import ArtifactError

ROWS_PER_GROUP = 64
"""Rows of a row group, the least that a worker reads: some 0.5 MB."""


@dataclass(frozen=True)
class StepFiles:
    """Finished files. Picklable; they are opened when they are read."""

    folder: str
    rows_per_step: int
    steps_per_file: int

    def read(self, step: int, first: int, last: int, names: Sequence[str]) -> pa.Table:
        """Columns of the slots `first` to `last` of a step, that one excluded.

        Raises:
            ArtifactError: a file is missing or broken.
        """
        place = step % self.steps_per_file
        groups_per_step = -(-self.rows_per_step // ROWS_PER_GROUP)
        groups = range(first // ROWS_PER_GROUP, -(-last // ROWS_PER_GROUP))
        path = join(self.folder, file_name(step - place))
        filesystem, inside = open_storage(path)
        try:
            with filesystem.open_input_file(inside) as file:
                reader = open_parquet(file, metadata=self._footers.get(path))
                self._footers.clear()  # steps are read in order: one footer is enough
                self._footers[path] = reader.metadata
                wanted = [place * groups_per_step + group for group in groups]
                table = reader.read_row_groups(wanted, columns=["step", "slot", *names])
        except (OSError, pa.ArrowException) as error:
            raise unreadable(error)(f"cannot read the batch plan {path!r}: {error}") from error
        table = table.slice(first - groups[0] * ROWS_PER_GROUP, last - first)
        slots = table["slot"].to_numpy()
        if not np.array_equal(slots, np.arange(first, last)) or set(table["step"].to_pylist()) != {
            step
        }:
            raise ArtifactError(f"the batch plan {path!r} does not hold step {step} where it must")
        return table.select(names)

    @cached_property
    def _footers(self) -> dict[str, pq.FileMetaData]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_footers"}


def write_steps(
    folder: str, table: pa.Table, schema: pa.Schema, *, first_step: int, rows_per_step: int
) -> str:
    """The name of a file that holds whole steps, whose rows stand in their order.

    Args:
        schema: of the file, `step` and `slot` in it.
    """
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for first in range(0, len(table), rows_per_step):
            # One write a step, so that no row group spans two steps.
            writer.write_table(table.slice(first, rows_per_step), row_group_size=ROWS_PER_GROUP)
    name = file_name(first_step)
    write_atomic(join(folder, name), buffer.getvalue().to_pybytes())
    return name


def file_name(first_step: int) -> str:
    """Name of the file whose first step it is."""
    return f"steps-{first_step:09d}.parquet"

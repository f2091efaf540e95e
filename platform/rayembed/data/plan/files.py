"""Writing of plan files: rows are scattered by block of steps, then gathered.

Each part is read once and each block is assembled once, so memory is bounded by a part and a block
for any data size. Both are tasks over work items, run here or by Ray Data.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import file_name, join, write_atomic
from rayembed.data.parts import NEGATIVE, OPTIONAL, SCHEMA, read_table
from rayembed.data.plan.balance import balanced_steps
from rayembed.data.plan.batch_plan import write_steps
from rayembed.data.work_items import Result
from rayembed.errors import ArtifactError

PLAN_SCHEMA = pa.schema([("step", pa.int64()), ("slot", pa.int32()), *SCHEMA])

ROWS_PER_FILE = 8192
"""Rows in a plan file: about 50 MB of text with seven negatives a row."""


@dataclass(frozen=True)
class PartPlaces:
    """Plan positions of one part's rows; a row may have several."""

    path: str
    row: np.ndarray
    """(m,) int64 row numbers of the part."""
    step: np.ndarray
    """(m,) int64 step of each position."""
    slot: np.ndarray
    """(m,) int32 slot of each position."""

    @property
    def key(self) -> str:
        """Unique name from part and positions, wherever the part lies."""
        digest = xxhash.xxh3_64()
        for array in (self.row, self.step, self.slot):
            digest.update(np.ascontiguousarray(array).tobytes())
        return f"{xxhash.xxh3_64_hexdigest(file_name(self.path).encode())}-{digest.hexdigest()}"


@dataclass(frozen=True)
class Scatter:
    """Task: scatter a part's rows to their positions, one file for each block of steps."""

    folder: str
    steps_per_file: int
    num_negatives: int

    def __call__(self, item: PartPlaces) -> Result:
        """Report `files`: block → path of this part's rows in the block."""
        table = _trim(read_table(item.path), self.num_negatives)
        return {"files": write_blocks(self.folder, table, item, self.steps_per_file)}


@dataclass(frozen=True)
class Block:
    """Work item: the steps of one plan file."""

    number: int
    first_step: int
    num_steps: int
    paths: tuple[str, ...]
    """Scattered files that hold its rows, in any order."""

    @property
    def key(self) -> str:
        """Unique name from its number and inputs, wherever they lie."""
        named = json.dumps([file_name(path) for path in self.paths])
        return f"{self.number:06d}-{xxhash.xxh3_64_hexdigest(named.encode())}"


@dataclass(frozen=True)
class Gather:
    """Task: gather one plan file, rows sorted by step and slot, in row groups that workers read."""

    folder: str
    global_pairs: int
    columns: tuple[str, ...] = ()
    """Columns of `OPTIONAL` that rows bring along."""

    def __call__(self, block: Block) -> Result:
        """Report `file`, `steps` (hash of each step's rows) and `rows_by_dataset`."""
        table = read_block(self.folder, block, self.global_pairs)
        table = _planned(balanced_steps(table, self.global_pairs), self.columns)
        name = write_steps(
            self.folder,
            table,
            first_step=block.first_step,
            rows_per_step=self.global_pairs,
        )
        counts = pc.value_counts(table["dataset"]).to_pylist()
        return {
            "file": name,
            "steps": [
                step_hash(table.slice(step * self.global_pairs, self.global_pairs))
                for step in range(block.num_steps)
            ],
            "rows_by_dataset": {item["values"]: item["counts"] for item in counts},
        }


def write_blocks(
    folder: str, table: pa.Table, item: PartPlaces, steps_per_block: int
) -> dict[str, str]:
    """Write a part's rows by block, with their positions: block → path below the folder."""
    block = item.step // steps_per_block
    files: dict[str, str] = {}
    for number in np.unique(block).tolist():
        chosen = np.flatnonzero(block == number)
        rows = table.take(pa.array(item.row[chosen]))
        rows = rows.add_column(0, "slot", pa.array(item.slot[chosen], pa.int32()))
        rows = rows.add_column(0, "step", pa.array(item.step[chosen], pa.int64()))
        files[str(number)] = f"scattered/{number:06d}/{item.key}.parquet"
        write_atomic(join(folder, files[str(number)]), parquet_bytes(rows))
    return files


def blocks_of(
    folder: str, scattered: Sequence[Result], num_steps: int, steps_per_block: int
) -> list[Block]:
    """Blocks from the results of tasks that called `write_blocks` with the folder."""
    files: dict[int, list[str]] = {}
    for result in scattered:
        for block, path in result["files"].items():
            files.setdefault(int(block), []).append(join(folder, path))
    return [
        Block(
            number,
            number * steps_per_block,
            min(steps_per_block, num_steps - number * steps_per_block),
            tuple(files[number]),
        )
        for number in sorted(files)
    ]


def read_block(folder: str, block: Block, rows_per_step: int) -> pa.Table:
    """Rows of a block, sorted by step and slot.

    Raises:
        ArtifactError: the scattered files do not fill it.
    """
    tables = [read_table(path) for path in block.paths]
    table = pa.concat_tables(tables, promote_options="default")
    table = table.sort_by([("step", "ascending"), ("slot", "ascending")])
    places = table["step"].to_numpy() * rows_per_step + table["slot"].to_numpy()
    first = block.first_step * rows_per_step
    wanted = np.arange(first, first + block.num_steps * rows_per_step)
    if not np.array_equal(places, wanted):
        raise ArtifactError(
            f"block {block.number} of {folder!r} has {len(places)} rows that do not fill its "
            f"{len(wanted)} places; remove the folder and prepare it again"
        )
    return table


def step_hash(rows: pa.Table) -> str:
    """Content hash of a step's rows in their order, in hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for row in rows.to_pylist():
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode())
    return digest.hexdigest()


def part_places(
    paths: Sequence[str],
    rows_of_parts: Sequence[int],
    row: np.ndarray,
    step: np.ndarray,
    slot: np.ndarray,
    most: int | None = None,
) -> list[PartPlaces]:
    """Positions of global row numbers, split by part; parts without any are left out.

    Args:
        most: places of a unit; a part with more of them gives several. None: no limit.
    """
    first = np.concatenate([[0], np.cumsum(rows_of_parts)])
    order = np.argsort(row, kind="stable")
    row, step, slot = row[order], step[order], slot[order]
    edges = np.searchsorted(row, first)
    return [
        PartPlaces(path, row[c:d] - start, step[c:d], slot[c:d])
        for path, start, a, b in zip(paths, first[:-1], edges[:-1], edges[1:], strict=True)
        for c in range(a, b, most or max(b - a, 1))
        for d in [min(b, c + most) if most else b]
    ]


def _planned(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Table of a plan's columns; one of `columns` that no part has is empty."""
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(OPTIONAL.field(name), pa.nulls(len(table), pa.float32()))
    schema = pa.schema([*PLAN_SCHEMA, *map(OPTIONAL.field, columns)])
    return table.select(schema.names).cast(schema)


def _trim(table: pa.Table, num_negatives: int) -> pa.Table:
    """Table with at most the first `num_negatives` negatives of each row."""
    place = table.schema.get_field_index("negatives")
    if num_negatives:
        trimmed = pc.list_slice(table["negatives"], 0, num_negatives)
    else:
        trimmed = pa.array([[]] * len(table), pa.list_(NEGATIVE))
    return table.set_column(place, SCHEMA.field("negatives"), trimmed.cast(pa.list_(NEGATIVE)))

"""Write plan files: one task sends rows to the file of their steps, another sorts and writes each
file.

Each part is read once and each block is assembled once, so memory is bounded by a part and a block
for any data size. Both are tasks over work items, run here or by Ray Data.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.storage import file_name
from rayembed.data.engine.exchange import Buckets, Sent
from rayembed.data.engine.parts import NEGATIVE, OPTIONAL, SCHEMA, read_table
from rayembed.data.engine.work_items import Result
from rayembed.data.plan.batch_plan import write_steps
from rayembed.data.plan.scratch import PartPlaces
from rayembed.data.plan.teacher_scores import (
    SCORES_COLUMN,
    SCORES_OF_POSITIVES,
    score_counts,
)
from rayembed.errors import ArtifactError

PLAN_SCHEMA = pa.schema([("step", pa.int64()), ("slot", pa.int32()), *SCHEMA])

_NONE = pa.table({"step": pa.array([], pa.int64()), "slot": pa.array([], pa.int32())})

ROWS_PER_FILE = 8192
"""Rows in a plan file: about 50 MB of text with seven negatives a row."""


@dataclass(frozen=True)
class SendRows:
    """Task: send each row of a Parquet part to the plan files of its positions, with the positive
    to be trained there moved to the front.

    Of a row with n positives the k-th place, from 0, trains the positive k mod n.
    """

    rows_per_step: int
    steps_per_file: int
    num_negatives: int
    num_positives: int = 1

    def __call__(self, item: PartPlaces) -> Sent:
        """Return copies of the rows for their positions, and counts of distinct `rows`, their
        `positives`, and positives that are `trained`.
        """
        table = _trim(read_table(item.part.path), self.num_negatives)
        sent = placed_rows(table, item, self.rows_per_step, self.steps_per_file)
        turns = item.read()[2]
        count = pc.list_value_length(sent.table["positives"]).to_numpy().astype(np.int64)
        counts = {
            "dataset": table["dataset"][0].as_py(),
            "rows": int((turns == 0).sum()),
            "positives": int(count[turns == 0].sum()),
            # The first place of a row trains its first ones, each further place one more.
            "trained": int(np.minimum(self.num_positives, count)[turns == 0].sum())
            + int(((turns > 0) & (turns + self.num_positives - 1 < count)).sum()),
        }
        return Sent(with_next_positives(sent.table, turns), sent.bucket, counts)


def with_next_positives(table: pa.Table, turns: np.ndarray) -> pa.Table:
    """Rotate the positives of each row so that a row drawn several times trains each positive in
    turn; scores move along.

    A positive that nothing scored has no score.

    Args:
        table: n records.
        turns: (n,) int64 how often each was placed before.
    """
    positives = table["positives"].combine_chunks()
    count = pc.list_value_length(positives).to_numpy(zero_copy_only=False).astype(np.int64)
    shift = turns % np.maximum(count, 1)
    changed = np.flatnonzero(shift)
    if len(changed):
        starts = np.repeat(np.cumsum(count) - count, count)
        inside = np.arange(len(starts)) - starts
        order = starts + (inside + np.repeat(shift, count)) % np.repeat(count, count)
        offsets = pa.array(np.concatenate([[0], np.cumsum(count)]), pa.int32())
        flat = positives.flatten().take(pa.array(order))
        table = _with_column(table, "positives", pa.ListArray.from_arrays(offsets, flat))
        for name, every in SCORES_OF_POSITIVES.items():
            if name not in table.column_names:
                continue
            scores = table[name].to_pylist()
            known = every in table.column_names
            of_all: list[Any] = table[every].to_pylist() if known else [None] * len(shift)
            for row in changed.tolist():
                scores[row] = None if of_all[row] is None else of_all[row][shift[row]]
            table = _with_column(table, name, pa.array(scores, pa.float32()))
    gone = [name for name in SCORES_OF_POSITIVES.values() if name in table.column_names]
    return table.drop_columns(gone) if gone else table


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), values)


@dataclass(frozen=True)
class Block:
    """Work item: the consecutive steps of one plan file."""

    number: int
    first_step: int
    num_steps: int
    sent: str
    """Name of the folder that holds its rows, derived from the inputs."""

    @property
    def key(self) -> str:
        """Unique name from the block's number and the folder of its rows."""
        return f"{self.number:06d}-{self.sent}"


@dataclass(frozen=True)
class Gather:
    """Task: gather the rows of one plan file, sort them by step and slot, and write them in small
    row groups.
    """

    folder: str
    buckets: Buckets
    global_pairs: int
    columns: tuple[str, ...] = ()
    """Columns of `OPTIONAL` that rows carry."""

    def __call__(self, block: Block) -> Result:
        """Write the file; return its name as `file`, a hash of each of its `steps`,
        `rows_by_dataset`, and `scores_by_dataset` if the loss reads teacher scores.
        """
        table = read_block(self.buckets, block, self.global_pairs)
        table = _planned(balanced_steps(table, self.global_pairs), self.columns)
        name = write_steps(
            self.folder,
            table,
            first_step=block.first_step,
            rows_per_step=self.global_pairs,
        )
        counts = pc.value_counts(table["dataset"]).to_pylist()
        scores = {}
        if SCORES_COLUMN in self.columns:
            scores["scores_by_dataset"] = score_counts(table)
        return {
            "file": name,
            "steps": [
                step_hash(table.slice(step * self.global_pairs, self.global_pairs))
                for step in range(block.num_steps)
            ],
            "rows_by_dataset": {item["values"]: item["counts"] for item in counts},
            **scores,
        }


def placed_rows(
    table: pa.Table, item: PartPlaces, rows_per_step: int, steps_per_block: int
) -> Sent:
    """Copy each row of a Parquet part to all its positions in the plan, and name the block of steps
    of each copy.
    """
    row, position, _ = item.read()
    step, slot = np.divmod(position, rows_per_step)
    rows = table.take(pa.array(row))
    rows = rows.add_column(0, "slot", pa.array(slot.astype(np.int32)))
    rows = rows.add_column(0, "step", pa.array(step))
    return Sent(rows, step // steps_per_block, {})


def num_blocks(num_steps: int, steps_per_block: int) -> int:
    """Number of blocks, each of at most `steps_per_block` consecutive steps."""
    return -(-num_steps // steps_per_block)


def blocks_of(buckets: Buckets, num_steps: int, steps_per_block: int) -> list[Block]:
    """List the blocks of steps to which `placed_rows` has sent rows, as work items."""
    return [
        Block(number, first, min(steps_per_block, num_steps - first), file_name(buckets.folder))
        for number, first in enumerate(range(0, num_steps, steps_per_block))
    ]


def read_block(buckets: Buckets, block: Block, rows_per_step: int) -> pa.Table:
    """Read all rows of a block, sorted by step and slot.

    Raises:
        ArtifactError: the rows that were sent do not fill it.
    """
    tables = buckets.read(block.number)
    table = pa.concat_tables(tables, promote_options="default") if tables else _NONE
    table = table.sort_by([("step", "ascending"), ("slot", "ascending")])
    places = table["step"].to_numpy() * rows_per_step + table["slot"].to_numpy()
    first = block.first_step * rows_per_step
    wanted = np.arange(first, first + block.num_steps * rows_per_step)
    if not np.array_equal(places, wanted):
        raise ArtifactError(
            f"block {block.number} of {buckets.folder!r} has {len(places)} rows that do not fill "
            f"its {len(wanted)} slots; remove the folder and start the job again"
        )
    return table


def step_hash(rows: pa.Table) -> str:
    """Content hash of a step's rows in their order, in hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for row in rows.to_pylist():
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode())
    return digest.hexdigest()


def _planned(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Select and cast the columns of a plan; an optional column that no part has is filled with
    nulls.
    """
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(OPTIONAL.field(name), pa.nulls(len(table), pa.float32()))
    schema = pa.schema([*PLAN_SCHEMA, *map(OPTIONAL.field, columns)])
    return table.select(schema.names).cast(schema)


def _trim(table: pa.Table, num_negatives: int) -> pa.Table:
    """Cut the hard negatives of each row to the first `num_negatives`."""
    if num_negatives:
        trimmed = pc.list_slice(table["negatives"], 0, num_negatives)
    else:
        trimmed = pa.array([[]] * len(table), pa.list_(NEGATIVE))
    return _with_column(table, "negatives", trimmed.cast(pa.list_(NEGATIVE)))


_MOST_BYTES = 2048
"""Maximum number of bytes of a text that count: what is longer is cut by most models, at 512 tokens
or so."""

_SWAPS = 4

_SWAPPED = 64
"""Largest block of rows in which rows are swapped between halves: in larger ones the pairs are
enough."""

_SMALL = 4096
"""Largest batch that is balanced: in larger ones every worker has many rows."""


def balanced(costs: Sequence[float]) -> list[int]:
    """Order rows so that the first and the second half cost about the same, and so do the halves of
    each half.

    Workers take shares of equal size one after the other, so that their shares are balanced
    whatever their number: wholly where it is a power of two, else but for the blocks at their ends.
    Rows of like cost are dealt in pairs, the greater one to the half that costs less so far, from
    the greatest on; then rows change sides while that brings the halves nearer.
    """
    return _halved(list(range(len(costs))), costs)


def _halved(places: list[int], costs: Sequence[float]) -> list[int]:
    if len(places) < 2:
        return places
    places = sorted(places, key=lambda place: (-costs[place], place))
    light, heavy = list[int](), list[int]()
    difference = 0.0  # by how much `heavy` costs more
    for greater, smaller in zip(places[::2], places[1::2], strict=False):
        light.append(greater)
        heavy.append(smaller)
        difference -= costs[greater] - costs[smaller]
        if difference < 0:
            light, heavy, difference = heavy, light, -difference
    if len(places) % 2:
        light.append(places[-1])
    elif len(places) <= _SWAPPED and len(costs) <= _SMALL:
        _swap(light, heavy, costs)
    return _halved(light, costs) + _halved(heavy, costs)


def _swap(light: list[int], heavy: list[int], costs: Sequence[float]) -> None:
    """Swap a few pairs of rows between two halves, each time the pair that brings their total costs
    closest together.
    """
    for _ in range(_SWAPS):
        ours = np.array([costs[place] for place in light])
        theirs = np.array([costs[place] for place in heavy])
        difference = theirs.sum() - ours.sum()
        left = np.abs(difference - 2 * (theirs[:, None] - ours[None, :]))
        give, take = divmod(int(left.argmin()), len(light))
        if left[give, take] >= abs(difference):
            return
        heavy[give], light[take] = light[take], heavy[give]


def balanced_steps(table: pa.Table, rows_per_step: int) -> pa.Table:
    """Reorder the rows of each step by `balanced`, so that workers get similar loads, and renumber
    their slots.

    Args:
        table: sorted by `step` and `slot`.
    """
    costs = _bytes_of_rows(table).tolist()
    order = [
        first + place
        for first in range(0, len(table), rows_per_step)
        for place in balanced(costs[first : first + rows_per_step])
    ]
    slots = pa.array(np.arange(len(table)) % rows_per_step, table.schema.field("slot").type)
    place = table.schema.get_field_index("slot")
    return table.take(pa.array(order)).set_column(place, "slot", slots)


def _bytes_of_rows(table: pa.Table) -> np.ndarray:
    """(n,) int64 bytes of each row's query, first positive and negatives; a long text counts up to
    `_MOST_BYTES`.
    """

    def lengths(texts: pa.ChunkedArray | pa.Array) -> np.ndarray:
        found = pc.min_element_wise(pc.binary_length(texts), _MOST_BYTES)
        return np.array(found.to_numpy(zero_copy_only=False), dtype=np.int64)

    total = lengths(table["query"].combine_chunks())
    total += lengths(pc.list_element(table["positives"].combine_chunks(), 0))
    negatives = table["negatives"].combine_chunks()
    rows = pc.list_parent_indices(negatives).to_numpy(zero_copy_only=False)
    texts = lengths(pc.struct_field(pc.list_flatten(negatives), "text"))
    np.add.at(total, rows, texts)
    return total

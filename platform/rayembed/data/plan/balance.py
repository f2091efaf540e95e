"""Order of a batch's rows in which every worker's share takes about as long as the others'."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MOST_BYTES = 2048
"""Bytes of a text that count: what is longer is cut by most models, at 512 tokens or so."""

_SWAPS = 4

_SWAPPED = 64
"""Maximum rows of a block in which rows change sides: in larger ones the pairs are enough."""

_SMALL = 4096
"""Maximum rows of a batch that gets it: in larger ones every worker has many rows."""


def balanced(costs: Sequence[float]) -> list[int]:
    """Places of rows in an order whose halves cost about the same, and their halves, and so on.

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
    """Exchange the two rows that bring the sums nearest, a few times, while any do."""
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
    """Rows of whole steps, each step's in a balanced order and with slots that say so.

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
    """(n,) int64 bytes of each row's query, first positive and negatives, each up to a limit."""

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

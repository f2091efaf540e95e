"""The `blended` order: which row of which data set stands in which slot of which step.

It depends on the rows' hashes, the weights and the seed, and on nothing else: not on workers, not
on the order in which rows were read. G rows of a global batch.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rayembed.errors import DataError


@dataclass(frozen=True)
class Rows:
    """What the order needs to know of a data set."""

    name: str
    weight: float
    """Share of it in the stage, relative to the others."""
    query_hash: np.ndarray
    """(n,) int64 of the queries' texts, in an order that only the rows' content decides."""


@dataclass(frozen=True)
class Batch:
    """The rows of one step, by slot."""

    dataset: np.ndarray
    """(G,) int32 places in the sequence of data sets."""
    row: np.ndarray
    """(G,) int64 places in the data set's rows."""


def blended(
    datasets: Sequence[Rows], global_pairs: int, num_steps: int, seed: int, key: str
) -> Iterator[Batch]:
    """The batches of all steps, in order.

    Each batch has of each data set its share by weight, where what rounding leaves over is carried
    to the next step, so that the shares are exact to one row over any number of steps. A data set
    is walked in seeded permutations, one an epoch; no row comes again before all others came. A
    row whose query text the batch already has waits for the next batch, unless its epoch has no
    other row left.

    Args:
        key: names the stage, so that two stages with one seed differ.

    Raises:
        DataError: a data set has fewer rows than a batch takes of it.
    """
    total = sum(rows.weight for rows in datasets)
    shares = [rows.weight / total for rows in datasets]
    for rows, share in zip(datasets, shares, strict=True):
        needed = min(global_pairs, math.ceil(share * global_pairs - 1e-9))
        if len(rows.query_hash) < needed:
            raise DataError(
                f"data set {rows.name!r} has {len(rows.query_hash)} rows, but each batch of "
                f"{global_pairs} pairs takes up to {needed} of them (weight {rows.weight:g} of "
                f"{total:g}); lower batch.global_pairs or its weight, or add rows"
            )
    walks = [_Walk(rows, seed, key) for rows in datasets]
    owed = np.zeros(len(datasets))
    for step in range(num_steps):
        owed += np.array(shares) * global_pairs
        counts = _whole(owed, global_pairs)
        owed -= counts
        used: set[int] = set()
        drawn = [walk.draw(int(count), used) for walk, count in zip(walks, counts, strict=True)]
        places = np.repeat(np.arange(len(datasets), dtype=np.int32), counts)
        mixed = _generator(seed, key, "slots", step).permutation(global_pairs)
        yield Batch(places[mixed], np.concatenate(drawn)[mixed])


def _whole(owed: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that add up to `total`: rounded down, the rest to the largest remainders."""
    counts = np.maximum(np.floor(owed + 1e-9), 0).astype(np.int64)
    missing = total - int(counts.sum())
    order = np.lexsort((np.arange(len(owed)), -np.round(owed - counts, 9)))
    counts[order[: max(missing, 0)]] += 1
    for place in order[::-1]:  # only where a share rounded up before others were owed
        if missing >= 0:
            break
        taken = min(int(counts[place]), -missing)
        counts[place] -= taken
        missing += taken
    return counts


class _Walk:
    """Rows of one data set, epoch after epoch."""

    def __init__(self, rows: Rows, seed: int, key: str) -> None:
        self.rows, self.seed, self.key = rows, seed, key
        self.epoch = 0
        self.order = self._permutation()
        self.place = 0
        self.waiting: deque[int] = deque()

    def draw(self, count: int, used: set[int]) -> np.ndarray:
        """(count,) int64 rows; their query hashes are added to `used`."""
        ahead = self.order[self.place : self.place + count]
        hashes = set(self.rows.query_hash[ahead].tolist())
        if not self.waiting and len(hashes) == count and hashes.isdisjoint(used):
            self.place += count  # the usual case: all of the next rows fit
            used |= hashes
            return ahead
        taken: list[int] = []
        waiting, self.waiting = self.waiting, deque()
        for row in waiting:
            self._take_or_wait(row, count, taken, used)
        while len(taken) < count:
            if self.place < len(self.order):
                row = int(self.order[self.place])
                self.place += 1
                self._take_or_wait(row, count, taken, used)
            elif self.waiting:  # the epoch has nothing else: the batch gets a query twice
                taken.append(self.waiting.popleft())
            else:
                self.epoch += 1
                self.order, self.place = self._permutation(), 0
        return np.array(taken, dtype=np.int64)

    def _take_or_wait(self, row: int, count: int, taken: list[int], used: set[int]) -> None:
        query = int(self.rows.query_hash[row])
        if len(taken) < count and query not in used:
            used.add(query)
            taken.append(row)
        else:
            self.waiting.append(row)

    def _permutation(self) -> np.ndarray:
        generator = _generator(self.seed, self.key, self.rows.name, self.epoch)
        return generator.permutation(len(self.rows.query_hash)).astype(np.int64)


def _generator(seed: int, key: str, name: str, number: int) -> np.random.Generator:
    text = f"{seed}\0{key}\0{name}\0{number}"
    return np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(text.encode())))

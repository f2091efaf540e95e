"""Sampling shared by all policies: mixing shares and seeded epoch samplers over a data set's rows.

Results depend only on the rows' hashes, the weights and the seed, not on workers or the order in
which rows were read. G rows of a global batch.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True)
class DatasetRows:
    """Rows of a data set, as far as ordering needs them."""

    name: str
    weight: float
    """Sampling weight of the data set, relative to the others; see `shares`."""
    query_hash: np.ndarray
    """(n,) int64 hash of the queries' texts, in an order that only the rows' content decides."""
    rows_of: Mapping[int, int] | None = None
    """Hash of the language code → number of its rows, ascending: rows stand language after language
    in this order. None if the policy ignores languages."""


@dataclass(frozen=True)
class PlannedBatch:
    """Rows of one step, by slot."""

    dataset: np.ndarray
    """(G,) int32 data set numbers."""
    row: np.ndarray
    """(G,) int64 row numbers of the data set."""


def shares(weights: Sequence[float], rows: Sequence[int], temperature: float | None) -> np.ndarray:
    """Normalised sampling shares: each weight times its number of rows to the power 1/T.

    Args:
        temperature: T; None: the weights alone.
    """
    share = np.array(weights, dtype=np.float64)
    if temperature is not None:
        # By the largest: a small T would overflow, and only ratios count.
        share *= (np.array(rows) / max(rows)) ** (1.0 / temperature)
    return np.asarray(share / share.sum())


def whole_numbers(owed: np.ndarray, total: int) -> np.ndarray:
    """Round shares to integers that sum to `total`, by largest remainders."""
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


def sequence(counts: np.ndarray, seed: int, key: str) -> np.ndarray:
    """(sum of counts,) int64: each number i repeated `counts[i]` times, in seeded order."""
    numbers = np.repeat(np.arange(len(counts)), counts)
    return generator(seed, key, "sequence", 0).permutation(numbers)


class EpochSampler:
    """Epoch sampler: draws rows without replacement, each epoch in a new seeded permutation."""

    def __init__(self, name: str, query_hash: np.ndarray, seed: int, key: str) -> None:
        """Start with the first epoch; a permutation takes four bytes a row."""
        self.name, self.query_hash, self.seed, self.key = name, query_hash, seed, key
        self.epoch = 0
        self.order = self._permutation()
        self.place = 0
        self.waiting: deque[int] = deque()

    def draw(self, count: int, used: set[int]) -> np.ndarray:
        """Draw (count,) int64 rows; adds their query hashes to `used`.

        Rows are drawn without replacement within an epoch. A row whose query text is in `used`
        waits for the next call, unless its epoch has no other row left.
        """
        ahead = self.order[self.place : self.place + count]
        hashes = set(self.query_hash[ahead].tolist())
        if not self.waiting and len(hashes) == count and hashes.isdisjoint(used):
            self.place += count  # the usual case: all of the next rows fit
            used |= hashes
            return ahead.astype(np.int64)
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
                del self.order  # before there is another one
                self.order, self.place = self._permutation(), 0
        return np.array(taken, dtype=np.int64)

    def _take_or_wait(self, row: int, count: int, taken: list[int], used: set[int]) -> None:
        query = int(self.query_hash[row])
        if len(taken) < count and query not in used:
            used.add(query)
            taken.append(row)
        else:
            self.waiting.append(row)

    def _permutation(self) -> np.ndarray:
        # The same order as `permutation`'s, which has eight bytes a row: a shuffle swaps whatever
        # stands in the places that it draws.
        count = len(self.query_hash)
        order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        generator(self.seed, self.key, self.name, self.epoch).shuffle(order)
        return order


def generator(seed: int, key: str, name: str, number: int) -> np.random.Generator:
    """Random generator for one purpose: `name` and `number` within the stage `key`."""
    text = f"{seed}\0{key}\0{name}\0{number}"
    return np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(text.encode())))

"""Sampling that all policies share: mixing shares of data sets, and seeded samplers that draw a
data set's rows epoch by epoch.

Results depend only on the rows' hashes, the weights and the seed, not on workers or the order in
which rows were read. G rows of a global batch.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True)
class DatasetRows:
    """Fields of a data set's rows that batching policies need."""

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
    """Data set and row number of each slot of one step."""

    dataset: np.ndarray
    """(G,) int32 data set numbers."""
    row: np.ndarray
    """(G,) int64 row numbers of the data set."""


def shares(weights: Sequence[float], rows: Sequence[int], temperature: float | None) -> np.ndarray:
    """Share of each data set in the batches: its weight times its number of rows to the power 1/T,
    normalised to sum 1.

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
    """(sum of counts,) int64: each number i occurs `counts[i]` times, in seeded random order."""
    numbers = np.repeat(np.arange(len(counts)), counts)
    return generator(seed, key, "sequence", 0).permutation(numbers)


_HASHES_AT_ONCE = 1 << 20
_BUCKETS_OF_A_ROW = 16
"""Buckets for each row of a draw: one that no frequent query is in has a sixteenth as many rows as
such a query, about."""


def frequent(query_hash: np.ndarray, most: int) -> set[int]:
    """Find the queries that have more rows than an epoch has batches, so that a batch must hold
    several rows of such a query.

    Memory grows with the rows of a batch alone: hashes are counted one by one only where those that
    end alike are so many.

    Args:
        query_hash: (n,) int64, evenly spread in their last bits.
        most: largest number of rows that a draw takes.
    """
    draws = len(query_hash) / max(most, 1)
    mask = (1 << (_BUCKETS_OF_A_ROW * most).bit_length()) - 1
    alike = np.zeros(mask + 1, np.int64)
    for some in _in_chunks(query_hash):
        alike += np.bincount(some & mask, minlength=mask + 1)
    many = alike > draws
    found: Counter[int] = Counter()
    for some in _in_chunks(query_hash) if many.any() else ():
        counted = np.unique(some[many[some & mask]], return_counts=True)
        found.update(dict(zip(*(of.tolist() for of in counted), strict=True)))
    return {query for query, rows in found.items() if rows > draws}


def rows_of_queries(query_hash: np.ndarray, queries: set[int]) -> dict[int, int]:
    """Count the rows of each given query; queries without rows are left out."""
    wanted = np.array(sorted(queries), np.int64)
    counts = np.zeros(len(wanted), np.int64)
    for some in _in_chunks(query_hash) if queries else ():
        place = np.searchsorted(wanted, some).clip(max=len(wanted) - 1)
        counts += np.bincount(place[wanted[place] == some], minlength=len(wanted))
    told = zip(wanted.tolist(), counts.tolist(), strict=True)
    return {query: rows for query, rows in told if rows}


def _in_chunks(query_hash: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(query_hash), _HASHES_AT_ONCE):
        yield query_hash[first : first + _HASHES_AT_ONCE]


class EpochSampler:
    """Epoch sampler: draws rows without replacement, each epoch in a new seeded permutation.

    A draw has a query once. Of a query of more rows than an epoch has draws, those beyond are
    spread over it, and where other data sets bring the query, all: left to its end they would fill
    batches alone, and be no negatives to each other.
    """

    def __init__(
        self,
        name: str,
        query_hash: np.ndarray,
        seed: int,
        key: str,
        spread: Mapping[int, int],
    ) -> None:
        """Start with the first epoch; memory is four bytes for each row, and four more for each
        postponed row.

        Args:
            spread: rows of each query of which a batch may have several, `frequent` here or in
                another data set of the batches.
        """
        self.name, self.query_hash, self.seed, self.key = name, query_hash, seed, key
        self.spread = spread
        self.had = dict.fromkeys(spread, 0)
        """Spread query → its rows that were drawn in the epoch."""
        self.further = dict.fromkeys(spread, 0)
        """Spread query → its rows that came after another row of the query."""
        self.drawn = 0
        """Rows of the epoch that earlier draws took."""
        self.epoch = 0
        self.order = self._permutation()
        self.place = 0
        self.waiting = _WaitingPlaces(self.order.dtype.char)

    def draw(self, count: int, used: set[int]) -> np.ndarray:
        """Draw (count,) int64 row numbers, and add their query hashes to `used`.

        Rows are drawn without replacement within an epoch. A row whose query text is in `used`
        waits for the next call, unless its epoch has no other row left, or it is one of those of a
        query that are spread. Rows that have waited longest come first.
        """
        taken: list[int] = []
        due = self._due(count, used)
        new = self.spread.keys() - used
        before = dict(due)
        if self.waiting:
            taken += self.order[self.waiting.take(count, used, due)].tolist()
        else:
            ahead = self.order[self.place : self.place + count]
            hashes = set(self.query_hash[ahead].tolist())
            if len(hashes) == count and hashes.isdisjoint(used):
                self.place += count  # the usual case: all of the next rows fit
                self.drawn += count
                used |= hashes
                for query in self.had.keys() & hashes:
                    self.had[query] += 1
                return ahead.astype(np.int64)
        while len(taken) < count:
            if self.place < len(self.order):
                taken += self._take_ahead(count - len(taken), used, due)
            elif self.waiting:  # the epoch has nothing else: the batch gets a query twice
                taken.append(int(self.order[self.waiting.take_first()]))
            else:
                self.epoch += 1
                del self.order  # before there is another one
                self.order, self.place = self._permutation(), 0
                self.drawn, self.had = -len(taken), dict.fromkeys(self.spread, 0)
                self.further = dict(self.had)
                due, new = self._due(count, used), self.spread.keys() - used
                before = dict(due)
        self.drawn += count
        for query, left in due.items():
            rows = before[query] - left
            self.had[query] += rows
            self.further[query] += rows - (rows > 0 and query in new)
        return np.array(taken, dtype=np.int64)

    def _due(self, count: int, used: set[int]) -> dict[int, int]:
        """For each frequent query, compute how many of its rows the next draws may contain so that
        they spread evenly over the epoch. Rows beyond one per draw get the share of the epoch that
        is drawn with these draws, plus one; if the query is in `used`, all its rows get that share.
        """
        rows = len(self.query_hash)
        part = min(self.drawn + count, rows)
        due = {}
        for query, of in self.spread.items() if count else ():
            due[query] = max(of * count - rows, 0) * part // (rows * count) - self.further[query]
            if query in used:
                due[query] = max(due[query], of * part // rows - self.had[query])
            else:
                due[query] += 1
        return due

    def _take_ahead(self, count: int, used: set[int], due: dict[int, int]) -> list[int]:
        """Go through the next `count` rows: take each whose query is new in the batch or due to
        repeat, and postpone the others.
        """
        ahead = self.order[self.place : self.place + count]
        rows, queries = ahead.tolist(), self.query_hash[ahead].tolist()
        taken = []
        for place, (row, query) in enumerate(zip(rows, queries, strict=True), self.place):
            if _fits(query, used, due):
                taken.append(row)
            else:
                self.waiting.add(place, query)
        self.place += len(ahead)
        return taken

    def _permutation(self) -> np.ndarray:
        # The same order as `permutation`'s, which has eight bytes a row: a shuffle swaps whatever
        # stands in the places that it draws.
        count = len(self.query_hash)
        order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        generator(self.seed, self.key, self.name, self.epoch).shuffle(order)
        return order


def _fits(query: int, used: set[int], due: dict[int, int]) -> bool:
    """Return whether the batch may take a row of this query (it has none yet, or a repeat is due),
    and if so, count the row.
    """
    if query in used and due.get(query, 0) <= 0:
        return False
    used.add(query)
    if query in due:
        due[query] -= 1
    return True


class _WaitingPlaces:
    """Postponed positions in an epoch's order, grouped by query; the earliest is taken
    first.

    A draw comes to new rows only after it has taken all waiting queries that its batch lacked. So
    no more queries wait at once than a batch has, however many rows of them do: the heap stays
    short, and a draw does not take longer the more rows wait.
    """

    def __init__(self, typecode: str) -> None:
        """Start without postponed positions; `typecode` is the array type of positions."""
        self._typecode = typecode
        self._first: list[tuple[int, int]] = []
        """Heap of each query's earliest position, with the query."""
        self._later: dict[int, _Queue] = {}
        """Query → its other positions."""

    def __bool__(self) -> bool:
        return bool(self._first)

    def add(self, place: int, query: int) -> None:
        """Postpone a position, which must be later than all positions added before."""
        if query in self._later:
            self._later[query].append(place)
        else:
            self._later[query] = _Queue(self._typecode)
            heapq.heappush(self._first, (place, query))

    def take(self, count: int, used: set[int], due: dict[int, int]) -> list[int]:
        """Take up to `count` positions whose query is not in `used` or is due to repeat; add their
        queries to `used`.
        """
        taken: list[int] = []
        kept: list[tuple[int, int]] = []  # of queries in `used`: not looked at again in this draw
        while self._first and len(taken) < count:
            place, query = heapq.heappop(self._first)
            if not _fits(query, used, due):
                kept.append((place, query))
                continue
            taken.append(place)
            for following in self._next(query):
                if due.get(query, 0) > 0:
                    heapq.heappush(self._first, following)
                else:
                    kept.append(following)
        for first in kept:
            heapq.heappush(self._first, first)
        return taken

    def take_first(self) -> int:
        """Remove and return the earliest postponed position."""
        place, query = heapq.heappop(self._first)
        for first in self._next(query):
            heapq.heappush(self._first, first)
        return place

    def _next(self, query: int) -> list[tuple[int, int]]:
        """Return the next postponed position of a query as a heap entry, in a list that is empty if
        there is none.
        """
        if self._later[query]:
            return [(self._later[query].pop(), query)]
        del self._later[query]
        return []


class _Queue:
    """Queue of integers (first in, first out) in a compact array, since one query may have
    millions.
    """

    def __init__(self, typecode: str) -> None:
        self._numbers = array(typecode)
        self._start = 0

    def __bool__(self) -> bool:
        return self._start < len(self._numbers)

    def append(self, number: int) -> None:
        """Add a number at the end."""
        self._numbers.append(number)

    def pop(self) -> int:
        """Remove and return the number that was added first."""
        number = self._numbers[self._start]
        self._start += 1
        if 2 * self._start > len(self._numbers):  # moves fewer numbers than were taken since
            del self._numbers[: self._start]
            self._start = 0
        return number


def generator(seed: int, key: str, name: str, number: int) -> np.random.Generator:
    """Make the random generator for one purpose, given by `name` and `number` within the stage
    `key`.
    """
    text = f"{seed}\0{key}\0{name}\0{number}"
    return np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(text.encode())))

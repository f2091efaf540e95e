"""Plans of data with repeated queries: the order is the plain one, drawn in linear time."""

import hashlib
import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.data.plan.policies import blended, homogeneous
from rayembed.data.plan.sampling import (
    DatasetRows,
    EpochSampler,
    PlannedBatch,
    frequent,
    generator,
    rows_of_queries,
)


class PlainSampler:
    """What `EpochSampler` draws, by a list of the rows that wait, of which each draw sees all."""

    spreads = True

    def __init__(
        self, name: str, query_hash: np.ndarray, seed: int, key: str, spread: Mapping[int, int]
    ) -> None:
        self.query_hash = query_hash
        self.spread = spread if self.spreads else {}
        self.epochs: Iterator[list[int]] = (
            generator(seed, key, name, epoch).permutation(len(query_hash)).tolist()
            for epoch in itertools.count()
        )
        self.ahead = iter(next(self.epochs))
        self.waiting: list[int] = []
        self.had = Counter[int]()
        self.further = Counter[int]()
        self.drawn = 0

    def draw(self, count: int, used: set[int]) -> np.ndarray:
        taken: list[int] = []
        waiting: list[int] = []
        before = iter(self.waiting)
        rows = len(self.query_hash)

        others = set(used)

        def comes_again(query: int) -> bool:
            """Whether rows of the query are behind with what does not fit one a draw, or others
            brought it and they are behind in all.
            """
            of, done = self.spread.get(query, 0), min(self.drawn + count, rows) / rows
            excess = math.floor(max(of - rows / count, 0) * done + 1e-9)
            share = math.floor(of * done + 1e-9) if query in others else 0
            return self.further[query] < excess or self.had[query] < share

        while len(taken) < count:
            row = next(before, None)
            row = next(self.ahead, None) if row is None else row
            if row is None and waiting:
                taken.append(waiting.pop(0))
            elif row is None:
                self.ahead = iter(next(self.epochs))
                self.drawn = -len(taken)
                self.had.clear()
                self.further.clear()
                others = set(used)
            elif (query := int(self.query_hash[row])) in used and not comes_again(query):
                waiting.append(row)
            else:
                self.had[query] += 1
                self.further[query] += query in used
                used.add(query)
                taken.append(row)
        self.drawn += count
        self.waiting = waiting + list(before)
        return np.array(taken, dtype=np.int64)


class FormerSampler(PlainSampler):
    """A batch has a query once, however many rows of it there are, while there are others."""

    spreads = False


def repeated(rows: int, share: float, kinds: int, hot: int, seed: int = 0) -> np.ndarray:
    """Hashes of which so many kinds come at random, but for a share that has `hot` queries."""
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, kinds, rows) - kinds // 2
    same = rng.random(rows) < share
    hashes[same] = rng.integers(0, hot, int(same.sum()))
    return hashes


def batches(policy: Callable[..., Iterator[PlannedBatch]], *arguments: Any) -> list[Any]:
    return [(b.dataset.tolist(), b.row.tolist()) for b in policy(*arguments)]


KINDS = st.sampled_from([1, 2, 5, 9, 30, 10**9])
SHARES = st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.95])


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(
    policy=st.sampled_from([blended, homogeneous]),
    repeats=st.lists(st.tuples(KINDS, SHARES, st.integers(1, 12)), min_size=1, max_size=3),
    languages=st.integers(1, 3),
    pairs=st.sampled_from([1, 2, 3, 8, 9, 32]),
    batches_of_language=st.integers(1, 20),
    steps=st.integers(1, 90),
    seed=st.integers(0, 10**6),
)
def test_plans_are_those_of_a_list_of_waiting_rows(
    policy, repeats, languages, pairs, batches_of_language, steps, seed
) -> None:
    sizes = {language: pairs * batches_of_language + language for language in range(languages)}
    rows = [
        DatasetRows(
            f"d{i}", 1.0 + 0.7 * i, repeated(sum(sizes.values()), share, kinds, hot, seed), sizes
        )
        for i, (kinds, share, hot) in enumerate(repeats)
    ]
    found = batches(policy, rows, pairs, steps, seed, "k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.plan.policies.EpochSampler", PlainSampler)
        assert found == batches(policy, rows, pairs, steps, seed, "k")


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(
    rows=st.integers(1, 400),
    kinds=KINDS,
    share=SHARES,
    hot=st.integers(1, 40),
    draws=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60),
    seed=st.integers(0, 10**6),
)
def test_draws_of_any_length_are_those_of_a_list_of_waiting_rows(
    rows, kinds, share, hot, draws, seed
) -> None:
    """Batches that other data sets began, and draws of nothing, of one row and of many epochs."""
    hashes = repeated(rows, share, kinds, hot, seed)
    spread = rows_of_queries(hashes, frequent(hashes, 30))
    sampler, plain = (of("d", hashes, seed, "k", spread) for of in (EpochSampler, PlainSampler))
    used: set[int] = set()
    used_of_plain: set[int] = set()
    for count, begins in draws:
        if begins:
            used, used_of_plain = set(hashes[:count:3].tolist()), set(hashes[:count:3].tolist())
        found = sampler.draw(count, used)
        assert found.dtype == np.int64
        assert found.tolist() == plain.draw(count, used_of_plain).tolist()
        assert used == used_of_plain


ORDERS = {"blended": "5a1a4baf0d20d436", "homogeneous": "2cea07e755054f52"}
"""Hashes of orders, of the sampler that looked through all waiting rows at each draw."""


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_queries_that_fit_one_a_batch_is_what_it_always_was(case: str) -> None:
    policy = blended if case == "blended" else homogeneous
    rows = [
        DatasetRows(name, weight, repeated(1200, 0.3, 900, 12), {0: 500, 1: 700})
        for name, weight in (("a", 2.0), ("b", 1.0))
    ]
    told = hashlib.sha256()
    for batch in policy(rows, 24, 150, 5, "stage"):
        told.update(batch.dataset.astype("<i4").tobytes() + batch.row.astype("<i8").tobytes())
    assert told.hexdigest()[:16] == ORDERS[case]


class CountedHashes(np.ndarray):
    """Counts the hashes that are read."""

    count = 0

    def __getitem__(self, place: Any) -> Any:
        self.count += np.size(place)
        return np.asarray(self)[place]


class CountedSet(set[int]):
    """Counts what is looked for."""

    count = 0

    def __contains__(self, query: object) -> bool:
        self.count += 1
        return super().__contains__(query)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_frequent_query_is_spread_over_the_epoch(share: float) -> None:
    """The last batches would have no other query, and so no negatives, as the control shows."""
    pairs, steps = 32, 200
    hashes = repeated(pairs * steps, share, 10**9, 1)

    def rows_of_query(sampler: type[EpochSampler | PlainSampler]) -> np.ndarray:
        drawn = sampler("d", hashes, 0, "k", rows_of_queries(hashes, frequent(hashes, pairs)))
        batches = [drawn.draw(pairs, set()) for _ in range(steps)]
        assert len(np.unique(np.concatenate(batches))) == len(hashes), "an epoch"
        return np.array([(hashes[batch] == 0).sum() for batch in batches])

    former = rows_of_query(FormerSampler)
    assert (former == pairs).sum() > 0.9 * (share - 1 / pairs) * steps
    spread = rows_of_query(EpochSampler)
    assert spread.max() <= 2 * share * pairs + 2
    assert abs(spread[: steps // 2].sum() / spread.sum() - 0.5) < 0.05


@pytest.mark.parametrize("share", [0.1, 0.02, 0.005])
def test_a_query_that_another_data_set_has_in_every_batch_is_spread_too(share, monkeypatch) -> None:
    """It would wait for the end of its own epoch, and fill its share of the last batches."""
    pairs, steps = 64, 400
    queries = [
        repeated(pairs // 2 * steps, of, 10**9, 1, seed) for seed, of in ((0, 0.1), (1, share))
    ]
    rows = [DatasetRows(f"d{i}", 1.0, of) for i, of in enumerate(queries)]

    def most_of_a_batch() -> int:
        counts = [
            sum(int(queries[1][row] == 0) for row in batch.row[batch.dataset == 1])
            for batch in blended(rows, pairs, steps, 0, "k")
        ]
        assert sum(counts) == (queries[1] == 0).sum(), "an epoch"
        return max(counts)

    assert most_of_a_batch() < pairs / 6
    monkeypatch.setattr("rayembed.data.plan.policies.EpochSampler", FormerSampler)
    assert most_of_a_batch() > pairs / 4


@pytest.mark.parametrize("policy", [blended, homogeneous])
def test_plans_without_frequent_queries_are_those_of_before(policy) -> None:
    hashes = repeated(1200, 0.4, 10**9, 60)  # of 8 rows each, in 50 batches or 25 of a language
    rows = [DatasetRows("a", 1.0, hashes, {0: 600, 1: 600})]
    assert 10 < max(Counter(hashes.tolist()).values()) <= 25
    found = batches(policy, rows, 24, 130, 3, "k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.plan.policies.EpochSampler", FormerSampler)
        assert found == batches(policy, rows, 24, 130, 3, "k")


@pytest.mark.parametrize("at_once", [1 << 20, 7])
@pytest.mark.parametrize("most", [1, 2, 8, 300])
def test_frequent_queries_are_those_of_more_rows_than_batches(most, at_once, monkeypatch) -> None:
    monkeypatch.setattr("rayembed.data.plan.sampling._HASHES_AT_ONCE", at_once)
    for share, hot in ((0.0, 1), (0.4, 3), (1.0, 1)):
        hashes = repeated(600, share, 150, hot)
        rows = Counter(hashes.tolist())
        wanted = {query: count for query, count in rows.items() if count * most > 600}
        assert frequent(hashes, most) == wanted.keys()
        assert rows_of_queries(hashes, {*wanted, 10**12, -(10**12)}) == wanted
    assert frequent(np.empty(0, np.int64), most) == set()
    assert rows_of_queries(np.empty(0, np.int64), {1}) == {}


def looks(
    sampler: type[EpochSampler | PlainSampler], hashes: np.ndarray, pairs: int, taken: int
) -> int:
    """Hashes read, and queries looked for in a batch that has some before, in one epoch."""
    counted = hashes.view(CountedHashes)
    drawn = sampler("d", counted, 0, "k", {})
    count = 0
    for _ in range(len(hashes) // pairs):
        used = CountedSet(range(taken))
        drawn.draw(pairs, used)
        count += used.count
    return count + counted.count


@pytest.mark.parametrize(("share", "hot", "pairs"), [(0.2, 5, 16), (0.5, 20, 32), (0.9, 80, 64)])
def test_looks_at_rows_grow_in_proportion_to_the_rows(share: float, hot: int, pairs: int) -> None:
    """Queries up to 1/G of the rows, which another data set has in every batch: all of them wait
    until there is nothing else.
    """
    few, many = 768, 4608
    n_log_n = many * math.log(many) / (few * math.log(few))

    def growth(sampler: type[EpochSampler | PlainSampler]) -> float:
        counts = [looks(sampler, repeated(n, share, 10**9, hot), pairs, hot) for n in (few, many)]
        return counts[1] / counts[0]

    assert growth(EpochSampler) < n_log_n
    assert looks(EpochSampler, repeated(many, share, 10**9, hot), pairs, hot) < 6 * many
    # The control: six times as many rows are more than fifteen times as many looks.
    assert growth(PlainSampler) > 15


def bytes_of_a_row(sampler: type[EpochSampler | PlainSampler]) -> float:
    """What the peak of an epoch grows by with each row, where queries of half of the rows wait."""
    peaks = []
    for rows in (8000, 16_000):
        hashes = repeated(rows, 0.5, 10**9, 400)
        tracemalloc.start()
        drawn = sampler("d", hashes, 0, "k", {})
        # Another data set has them in every batch: all others are taken, and most of them wait.
        for _ in range(rows // 200 // 2):
            drawn.draw(200, set(range(400)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return (peaks[1] - peaks[0]) / 8000


def test_waiting_rows_take_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes of the permutation, and four of each row that waits, with room to grow."""
    monkeypatch.setattr("rayembed.data.plan.sampling._HASHES_AT_ONCE", 1000)
    assert bytes_of_a_row(EpochSampler) < 7
    assert bytes_of_a_row(PlainSampler) > 10  # the control

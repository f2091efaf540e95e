"""Plans of data with repeated queries: the order is the plain one, drawn in linear time."""

import hashlib
import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.data.plan.policies import blended, homogeneous
from rayembed.data.plan.sampling import DatasetRows, EpochSampler, PlannedBatch, generator


class PlainSampler:
    """What `EpochSampler` draws, by a list of the rows that wait, of which each draw sees all."""

    def __init__(self, name: str, query_hash: np.ndarray, seed: int, key: str) -> None:
        self.query_hash = query_hash
        self.epochs: Iterator[list[int]] = (
            generator(seed, key, name, epoch).permutation(len(query_hash)).tolist()
            for epoch in itertools.count()
        )
        self.ahead = iter(next(self.epochs))
        self.waiting: list[int] = []

    def draw(self, count: int, used: set[int]) -> np.ndarray:
        taken: list[int] = []
        waiting: list[int] = []
        before = iter(self.waiting)
        while len(taken) < count:
            row = next(before, None)
            row = next(self.ahead, None) if row is None else row
            if row is None and waiting:
                taken.append(waiting.pop(0))
            elif row is None:
                self.ahead = iter(next(self.epochs))
            elif (query := int(self.query_hash[row])) in used:
                waiting.append(row)
            else:
                used.add(query)
                taken.append(row)
        self.waiting = waiting + list(before)
        return np.array(taken, dtype=np.int64)


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
    sampler, plain = (of("d", hashes, seed, "k") for of in (EpochSampler, PlainSampler))
    used: set[int] = set()
    used_of_plain: set[int] = set()
    for count, begins in draws:
        if begins:
            used, used_of_plain = set(hashes[:count:3].tolist()), set(hashes[:count:3].tolist())
        found = sampler.draw(count, used)
        assert found.dtype == np.int64
        assert found.tolist() == plain.draw(count, used_of_plain).tolist()
        assert used == used_of_plain


ORDERS = {
    "blended, one query": "4e59fd1a723d7079",
    "blended, many queries": "5a1a4baf0d20d436",
    "homogeneous, one query": "66b1fed06d99dd8c",
    "homogeneous, many queries": "2cea07e755054f52",
}
"""Hashes of orders, of the sampler that looked through all waiting rows at each draw."""


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_repeated_queries_is_what_it_always_was(case: str) -> None:
    policy = blended if case.startswith("blended") else homogeneous
    hot = 1 if case.endswith("one query") else 12
    rows = [
        DatasetRows(name, weight, repeated(1200, 0.3, 900, hot), {0: 500, 1: 700})
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


def looks(sampler: type[EpochSampler | PlainSampler], hashes: np.ndarray, pairs: int) -> int:
    """Hashes read, and queries looked for in a batch, in one epoch."""
    counted = hashes.view(CountedHashes)
    drawn = sampler("d", counted, 0, "k")
    count = 0
    for _ in range(len(hashes) // pairs):
        used = CountedSet()
        drawn.draw(pairs, used)
        count += used.count
    return count + counted.count


@pytest.mark.parametrize(("share", "hot"), [(0.1, 1), (0.5, 20), (1.0, 1)])
def test_looks_at_rows_grow_in_proportion_to_the_rows(share: float, hot: int) -> None:
    """Queries above 1/G of the rows: one of a tenth, twenty of a half, and nothing else."""
    few, many = 1536, 9216
    n_log_n = many * math.log(many) / (few * math.log(few))

    def growth(sampler: type[EpochSampler | PlainSampler]) -> float:
        counts = [looks(sampler, repeated(n, share, 10**9, hot), 64) for n in (few, many)]
        return counts[1] / counts[0]

    assert growth(EpochSampler) < n_log_n
    assert looks(EpochSampler, repeated(many, share, 10**9, hot), 64) < 5 * many
    # The control: six times as many rows are more than fifteen times as many looks.
    assert growth(PlainSampler) > 15


def bytes_of_a_row(sampler: type[EpochSampler | PlainSampler]) -> float:
    """What the peak of an epoch grows by with each row, where half of the rows are one query."""
    peaks = []
    for rows in (8000, 16_000):
        hashes = repeated(rows, 0.5, 10**9, 1)
        tracemalloc.start()
        drawn = sampler("d", hashes, 0, "k")
        # Until all others are taken, and most rows of the one query wait.
        for _ in range(rows // 500 // 2 + 1):
            drawn.draw(500, set())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return (peaks[1] - peaks[0]) / 8000


def test_waiting_rows_take_few_bytes() -> None:
    """Four bytes of the permutation, and four of each row that waits, with room to grow."""
    assert bytes_of_a_row(EpochSampler) < 7
    assert bytes_of_a_row(PlainSampler) > 10  # the control

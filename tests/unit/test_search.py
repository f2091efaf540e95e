"""Exact search equals a sort of all scores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.errors import DataError
from rayembed.search import exact
from rayembed.search.exact import NO_RESULT, top_k


def brute_force(queries: np.ndarray, corpus: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    ids = np.full((len(queries), k), NO_RESULT, dtype=np.int64)
    for row, query in enumerate(queries):
        found = [(-float(np.dot(query, document)), i) for i, document in enumerate(corpus)]
        for place, (score, i) in enumerate(sorted(found)[:k]):
            scores[row, place], ids[row, place] = -score, i
    return scores, ids


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    k=st.integers(1, 40),
)
def test_equals_brute_force_with_ties(seed: int, sizes: list[int], k: int) -> None:
    # Small whole numbers: products are exact in float32, and many scores are equal.
    rng = np.random.default_rng(seed)
    shards = [rng.integers(-2, 3, (n, 4)).astype(np.float32) for n in sizes]
    queries = rng.integers(-2, 3, (7, 4)).astype(np.float32)
    scores, ids = top_k(queries, shards, k)
    expected_scores, expected_ids = brute_force(queries, np.concatenate(shards), k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)
    assert scores.dtype == np.float32
    assert ids.dtype == np.int64


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    corpus = rng.integers(-2, 3, (100, 4)).astype(np.float16)
    queries = rng.integers(-2, 3, (11, 4)).astype(np.float16)
    whole = top_k(queries, [corpus], 20)
    monkeypatch.setattr(exact, "_TILE_QUERIES", 3)
    monkeypatch.setattr(exact, "_TILE_DOCUMENTS", 7)
    tiled = top_k(queries, [corpus[:33], corpus[33:]], 20)
    np.testing.assert_array_equal(whole[1], tiled[1])
    np.testing.assert_array_equal(whole[0], tiled[0])


def test_all_equal_gives_the_lowest_ids() -> None:
    scores, ids = top_k(np.ones((1, 3)), [np.ones((50, 3)), np.ones((50, 3))], 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    assert scores.tolist() == [[3.0] * 5]


def test_corpus_smaller_than_k_is_filled_up() -> None:
    scores, ids = top_k(np.ones((2, 3)), [np.ones((2, 3))], 4)
    assert ids.tolist() == [[0, 1, NO_RESULT, NO_RESULT]] * 2
    assert scores[0].tolist() == [3.0, 3.0, -np.inf, -np.inf]


def test_wrong_width_and_k_are_errors() -> None:
    with pytest.raises(DataError, match=r"shape \(2, 4\), expected \(n, 3\)"):
        top_k(np.ones((1, 3)), [np.ones((2, 4))], 1)
    with pytest.raises(DataError, match="k is 0"):
        top_k(np.ones((1, 3)), [np.ones((2, 3))], 0)

"""Rank fusion, and an index of words over a store's texts."""

import numpy as np
import pytest
from memory_store import MemoryStore, index_of

from rayembed.errors import ConfigError
from rayembed.evaluation.hybrid import fused
from rayembed.registry.indexes import IndexSearch
from rayembed_extras.index_upgrades.maps import unit
from rayembed_extras.indexing.table_search import TableSearch, fuse, word_index

TEXTS = ["Foxes eat mice", "owls hunt foxes and mice at night", "the", "", "Paris is a city"]


@pytest.fixture
def search(tmp_path):
    return search_of(tmp_path)


def search_of(tmp_path, *, rows=100, **documents):
    store = MemoryStore(rows_per_batch=2)
    vectors = unit(np.random.default_rng(0).standard_normal((len(TEXTS), 8)))
    manifest = index_of(store, tmp_path, "docs", TEXTS, vectors, documents=documents)
    return TableSearch(store, manifest.tables["docs_1"], bm25_rows=rows), store, vectors


def test_fusion_is_that_of_the_evaluation():
    chance = np.random.default_rng(3)
    for _ in range(20):
        names = [f"d{n}" for n in range(30)]
        rankings = [list(chance.permutation(names)[: chance.integers(1, 30)]) for _ in range(2)]
        scored = [{name: -float(n) + 100 for n, name in enumerate(one)} for one in rankings]
        ours, theirs = dict(fuse(rankings, 10)), fused(scored, 10)
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()))
        sums = {name: score for name, score in ours.items() if name in theirs}
        assert sums == pytest.approx({name: theirs[name] for name in sums})
    assert fuse([["b", "a"], ["a", "b"]], 1) == [("a", 1 / 61 + 1 / 62)], "ties: the lesser id"
    assert fuse([[], []], 3) == []


def test_words_find_the_rows_that_have_them(search):
    _, store, _ = search
    words = word_index(store, "docs_1")
    assert words("foxes MICE", 5) == ["r0", "r1"]
    assert words("foxes", 1) == ["r0"]
    assert words("paris?", 5) == ["r4"]
    for nothing in ("the", "", "?!", "zebra"):
        assert words(nothing, 5) == []


def test_an_index_without_a_word_finds_nothing(tmp_path):
    store = MemoryStore()
    index_of(store, tmp_path, "docs", ["the", ""], unit(np.eye(2, 8)))
    assert word_index(store, "docs_1")("foxes", 3) == []


def test_dense_and_hybrid_results_are_rows_of_the_table(search):
    made, _, vectors = search
    (dense,) = made.search(IndexSearch(vectors[4:], ["foxes"], 2, "dense"))
    assert (dense[0].id, dense[0].text, dense[0].document) == ("r4", TEXTS[4], "d4")
    assert dense[0].score == pytest.approx(1, abs=1e-6)
    (both,) = made.search(IndexSearch(vectors[4:], ["foxes"], 5, "hybrid"))
    assert len(both) == 5
    near = [hit.id for hit in made.search(IndexSearch(vectors[4:], ["foxes"], 5, "dense"))[0]]
    wanted = fuse([near, word_index(search[1], "docs_1")("foxes", 5)], 5)
    assert [(hit.id, hit.score) for hit in both] == wanted
    assert made.search(IndexSearch(np.empty((0, 8), np.float32), [], 2, "dense")) == []


def test_what_cannot_be_searched_for_words_is_refused(tmp_path):
    made, _, vectors = search_of(tmp_path, rows=4)
    with pytest.raises(ConfigError, match=r"5 rows, .* at most 4 \(limits.bm25_rows\)"):
        made.search(IndexSearch(vectors[:1], ["foxes"], 2, "hybrid"))
    made, _, vectors = search_of(tmp_path / "b", store_text=False)
    with pytest.raises(ConfigError, match="keeps no texts"):
        made.search(IndexSearch(vectors[:1], ["foxes"], 2, "hybrid"))
    (found,) = made.search(IndexSearch(vectors[:1], ["foxes"], 2, "dense"))
    assert found[0].text is None

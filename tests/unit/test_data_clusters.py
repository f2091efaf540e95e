"""Paired k-means, packing and false negatives against code that follows their definitions."""

import sys
import tempfile
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.config.mining import ClusterConfig
from rayembed.config.settings import parse
from rayembed.data.clusters import kmeans, packing, two_levels
from rayembed.data.clusters.kmeans import (
    cluster_pairs,
    joined,
    nearest,
    order_clusters,
)
from rayembed.data.clusters.packing import pack
from rayembed.data.clusters.scatter import ClusterCost
from rayembed.data.clusters.tasks import Sample, false_negatives, mean_similarity, sample_keys
from rayembed.data.clusters.two_levels import (
    Groups,
    _shares,
    cluster_in_groups,
    nearest_in_groups,
    num_groups,
    tour_of_groups,
)
from rayembed.data.hashes import nth_smallest
from rayembed.data.plan import scratch
from rayembed.errors import ConfigError
from rayembed.search.faiss_library import require_faiss


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    made = rng.standard_normal(shape)
    return (made / np.linalg.norm(made, axis=-1, keepdims=True)).astype(np.float32)


def blobs(rng: np.random.Generator, topics: int, rows: int, noise: float = 0.15):
    """Queries and documents around the query's and the document's own centre of each topic."""
    centres = unit(rng, topics, 2, 8)
    topic = rng.integers(0, topics, rows)
    made = centres[topic] + noise * rng.standard_normal((rows, 2, 8))
    made = (made / np.linalg.norm(made, axis=-1, keepdims=True)).astype(np.float16)
    return made[:, 0], made[:, 1], topic


def lloyd(rows: np.ndarray, centroids: np.ndarray, iterations: int) -> float:
    """Mean cosine with the nearest centroid after plain spherical k-means from given ones."""
    centroids = centroids.astype(np.float64)
    for _ in range(iterations):
        chosen = (rows @ centroids.T).argmax(1)
        for c in range(len(centroids)):
            if (chosen == c).any():
                mean = rows[chosen == c].mean(0)
                centroids[c] = mean / np.linalg.norm(mean)
    return float((rows @ centroids.T).max(1).mean())


@pytest.mark.parametrize("seed", range(2))
def test_objective_is_that_of_both_orders_and_not_worse_than_plain_lloyd(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    queries, documents, _ = blobs(rng, 4, 300)
    k = 8  # each topic has two centres among both orders of its pairs
    runs = [cluster_pairs(queries, documents, k, iterations=50, seed=s) for s in range(30)]
    best, objective = max(runs, key=itemgetter(1))
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    rows = np.concatenate([np.hstack([q, d]), np.hstack([d, q])])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(np.linalg.norm(best, axis=1), 1, atol=1e-5)
    assert objective == pytest.approx(lloyd(rows, best, 0), abs=1e-6)
    for centroids, found in runs:  # it has converged: going on by the plain method gains nothing
        assert found >= lloyd(rows, centroids, 5) - 1e-6
    starts = [rows[rng.choice(len(rows), k, replace=False)] for _ in range(30)]
    plain = [lloyd(rows, start, 50) for start in starts]
    assert objective >= max(plain) - 1e-6
    assert objective > min(plain) + 0.01, "one start alone may end far below"
    monkeypatch.setattr("rayembed.data.clusters.kmeans._TILE_PAIRS", 77)
    again, _ = cluster_pairs(queries, documents, k, iterations=50, seed=0)
    np.testing.assert_array_equal(again, runs[0][0])


def test_pairs_of_a_topic_come_together() -> None:
    queries, documents, topic = blobs(np.random.default_rng(1), 5, 400, noise=0.02)
    runs = [cluster_pairs(queries, documents, 10, iterations=50, seed=s) for s in range(10)]
    best, _ = max(runs, key=itemgetter(1))
    cluster = nearest(joined(queries, documents), best)[0]
    assert len({*zip(topic.tolist(), cluster.tolist(), strict=True)}) == 5
    assert len(set(cluster.tolist())) == 5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 60), clusters=st.integers(1, 30))
def test_assignment_equals_brute_force(seed: int, rows: int, clusters: int) -> None:
    rng = np.random.default_rng(seed)
    # Whole numbers have exact products with many ties, which go to the lower number.
    pairs = rng.integers(-2, 3, (rows, 8)).astype(np.float32)
    centroids = rng.integers(-2, 3, (clusters, 8)).astype(np.float32)
    found, products = nearest(pairs, centroids)
    for i, row in enumerate(pairs.tolist()):
        scores = [sum(a * b for a, b in zip(row, c, strict=True)) for c in centroids.tolist()]
        assert products[i] == max(scores)
        assert found[i] == scores.index(max(scores))


def test_rows_are_of_unit_length_whatever_float16_left() -> None:
    queries, documents, _ = blobs(np.random.default_rng(0), 3, 50)
    rows = joined(queries, documents)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    plain = np.hstack([queries, documents]).astype(np.float32) / np.sqrt(2)
    np.testing.assert_allclose(rows, plain, atol=1e-3)


def test_without_faiss_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"'\.\[cpu\]' or '\.\[gpu\]'"):
        require_faiss("clusters")


def test_a_sample_is_the_same_rows_in_any_order() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**62), 2**62, 500)
    sample = Sample.of(ids, 40, seed=3)
    assert sample == Sample.of(rng.permutation(ids), 40, seed=3)
    chosen = ids[sample_keys(ids, 3) <= np.uint64(sample.last_key)]
    assert len(chosen) == sample.size == 40
    other = ids[sample_keys(ids, 4) <= np.uint64(Sample.of(ids, 40, seed=4).last_key)]
    assert len(set(chosen) & set(other)) < 20
    assert Sample.of(ids, 9999, seed=3).size == 500


def tour_by_hand(centroids: np.ndarray, start: int) -> list[int]:
    tour, left = [start], set(range(len(centroids))) - {start}
    while left:
        here = centroids[tour[-1]].astype(np.float64)
        tour.append(max(left, key=lambda c: (float(centroids[c].astype(np.float64) @ here), -c)))
        left.remove(tour[-1])
    return tour


@pytest.mark.parametrize("neighbours", [1, 4, 64])
def test_greedy_tour_equals_a_loop(neighbours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "_NEIGHBOURS", neighbours)
    for seed in range(5):
        centroids = unit(np.random.default_rng(seed), 150, 12)
        tour = order_clusters(centroids, "tsp", np.random.default_rng(seed))
        assert tour.tolist() == tour_by_hand(centroids, int(tour[0]))
    assert order_clusters(centroids[:1], "tsp", np.random.default_rng(0)).tolist() == [0]


def test_a_tour_is_shorter_than_a_random_order() -> None:
    centroids = unit(np.random.default_rng(0), 200, 6)

    def length(order: np.ndarray) -> float:
        return float((centroids[order[1:]] * centroids[order[:-1]]).sum(1).mean())

    orders = [order_clusters(centroids, "random", np.random.default_rng(s)) for s in range(2)]
    assert sorted(orders[0].tolist()) == list(range(200))
    assert orders[0].tolist() != orders[1].tolist()
    tour = order_clusters(centroids, "tsp", np.random.default_rng(0))
    assert length(tour) > length(orders[0]) + 0.3


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    pairs=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_packing_splits_large_clusters_and_merges_neighbours(sizes, pairs, seed) -> None:
    rng = np.random.default_rng(seed)
    cluster = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    keys = rng.permutation(len(cluster))
    tour = rng.permutation(np.flatnonzero(sizes))
    batches = pack(cluster, keys, tour, pairs)
    assert batches.shape == (len(cluster) // pairs, pairs)
    assert len(set(batches.ravel().tolist())) == batches.size, "no row twice"
    # By hand: whole batches of each cluster by key, then what is left of all along the tour.
    whole, rest = [], []
    for c in tour:
        rows = sorted(np.flatnonzero(cluster == c).tolist(), key=lambda row: keys[row])
        full = len(rows) // pairs * pairs
        whole += [rows[i : i + pairs] for i in range(0, full, pairs)]
        rest += rows[full:]
    merged = [rest[i : i + pairs] for i in range(0, len(rest) // pairs * pairs, pairs)]
    assert sorted(batches.tolist()) == sorted(whole + merged)
    places = {int(c): i for i, c in enumerate(tour)}
    firsts = [places[int(cluster[batch[0]])] for batch in batches]
    assert firsts == sorted(firsts), "along the tour"
    # Runs of a few rows, which come some at a time, change nothing.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(scratch, "ROWS_OF_RUN", 7)
        patch.setattr(packing, "_ROWS_AT_ONCE", 5)
        cut = iter(np.array_split(keys, 4))
        again = packing.pack_on_disk(Path(folder), cluster, cut, tour, pairs)
        assert (len(again), again.size) == (len(batches), batches.size)
        assert [row for some in again.read() for row in some.tolist()] == batches.tolist()


def test_the_nth_smallest_is_that_of_all_keys() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    keys[:300] = keys[300:600]
    keys[0], keys[1] = 0, 2**64 - 1
    for n in (1, 2, 500, 999, 1000):
        assert nth_smallest(lambda: np.array_split(keys, 7), n) == np.sort(keys)[n - 1]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 25),
    margin=st.sampled_from([0.0, -1.0, 1.0, 2.5]),
)
def test_false_negatives_equal_their_definition(seed: int, rows: int, margin: float) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, (rows, 4)).astype(np.float16)
    vectors = rng.integers(-2, 3, (15, 4)).astype(np.float16)
    # Some documents are the same text, and every second row trains two of them in turn.
    positives = [rng.integers(1, 15, 1 + i % 2).tolist() for i in range(rows)]
    documents = vectors[[text for of_row in positives for text in of_row]]
    found, counts = false_negatives(queries, documents, positives, margin)
    for i in range(rows):
        own = min(float(queries[i] @ vectors[text]) for text in positives[i])
        wanted = [
            [
                text
                for text in of_row
                if float(queries[i] @ vectors[text]) >= own + margin and text not in positives[i]
            ]
            for of_row in positives
        ]
        assert found[i].tolist() == sorted({text for of_row in wanted for text in of_row})
        assert counts[i] == sum(map(bool, wanted))


def test_false_negatives_do_not_depend_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    queries, documents, _ = blobs(rng, 3, 50)
    positives = [[i + 1] for i in range(50)]
    whole = false_negatives(queries, documents, positives, 0.0)
    monkeypatch.setattr("rayembed.data.clusters.tasks._TILE_QUERIES", 7)
    tiled = false_negatives(queries, documents, positives, 0.0)
    assert [a.tolist() for a in whole[0]] == [a.tolist() for a in tiled[0]]
    assert whole[1].sum() > 0
    none = false_negatives(queries, documents, positives, 2.5)
    assert none[1].sum() == 0, "no cosine is so much higher"


def test_mean_similarity_leaves_a_pairs_own_document_out() -> None:
    queries, documents, _ = blobs(np.random.default_rng(0), 3, 20)
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    wanted = scores[~np.eye(20, dtype=bool)].mean()
    assert mean_similarity(queries, documents) == pytest.approx(wanted, abs=1e-12)
    assert mean_similarity(queries[:1], documents[:1]) == 0.0


def test_groups_have_their_clusters_and_rows_go_to_the_nearest_of_near_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_levels, "PROBES", 2)
    queries, documents, _ = blobs(np.random.default_rng(3), 12, 400, noise=0.6)
    asked = {"iterations": 8, "seed": 5}
    centroids, groups, objective = cluster_in_groups(queries, documents, 50, **asked)
    assert centroids.shape == (50, 2 * queries.shape[1])
    assert len(groups.centroids) == num_groups(50) == 8
    assert (groups.first[0], groups.first[-1]) == (0, 50)
    pairs = np.concatenate([joined(queries, documents), joined(documents, queries)])
    cluster, cosine = nearest_in_groups(pairs, centroids, groups)
    assert objective == pytest.approx(cosine.mean(), abs=1e-6)
    near = np.argsort(-(pairs @ groups.centroids.T), axis=1)[:, :2]
    inside = (groups.of(np.arange(50))[None, :, None] == near[:, None, :]).any(2)
    products = pairs @ centroids.T
    assert (np.where(inside, products, -np.inf).argmax(1) == cluster).all()
    assert (products.argmax(1) != cluster).any(), "two of eight groups are not all"
    monkeypatch.setattr(two_levels, "PROBES", 8)
    assert (nearest_in_groups(pairs, centroids, groups)[0] == nearest(pairs, centroids)[0]).all()
    monkeypatch.setattr(two_levels, "PROBES", 2)
    # It loses some against one level, and is far above fewer clusters.
    _, one_level = cluster_pairs(queries, documents, 50, **asked)
    assert one_level - 0.02 < objective <= one_level + 0.01, one_level
    assert objective > cluster_pairs(queries, documents, 8, **asked)[1]
    again = cluster_in_groups(queries, documents, 50, **asked)
    np.testing.assert_array_equal(again[0], centroids)
    assert nearest_in_groups(pairs[:0], centroids, groups)[0].shape == (0,)


def test_shares_add_up_within_their_limits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.integers(0, 40, rng.integers(1, 12))
        if not counts.sum():
            continue
        total = int(rng.integers((counts > 0).sum(), counts.sum() + 1))
        shares = _shares(counts, total)
        assert shares.sum() == total
        assert (shares <= counts).all()
        assert ((shares > 0) == (counts > 0)).all()
    assert _shares(np.array([10, 20, 30, 0]), 12).tolist() == [2, 4, 6, 0]


@pytest.mark.parametrize("neighbours", [1, 4, 64])
def test_a_tour_over_near_groups_is_the_greedy_one_where_all_groups_are_near(
    neighbours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_levels, "_NEIGHBOURS", neighbours)
    centroids, coarse = unit(np.random.default_rng(0), 60, 6), unit(np.random.default_rng(1), 5, 6)
    groups = Groups(coarse, np.array([0, 10, 10, 25, 40, 60]))
    cluster = np.setdiff1d(np.arange(60), [3, 25, 59])
    visited = centroids[cluster]
    tour = tour_of_groups(visited, cluster, groups, np.random.default_rng(2))
    assert tour.tolist() == tour_by_hand(visited, int(tour[0]))
    monkeypatch.setattr(two_levels, "PROBES", 1)
    tour = tour_of_groups(visited, cluster, groups, np.random.default_rng(2))
    assert sorted(tour.tolist()) == list(range(57))
    assert tour.tolist() != tour_by_hand(visited, int(tour[0]))


def config(**changes) -> ClusterConfig:
    return parse(ClusterConfig, {"teacher": "t", "batch_pairs": 512, **changes})


def test_cost_is_counted_and_what_is_too_much_is_told_before_the_work() -> None:
    small = ClusterCost.of(100_000, config())
    assert (small.clusters, small.levels, small.sample) == (196, 1, 50_176)
    assert small.kmeans_products == 3 * 101 * 2 * 50_176 * 196
    assert small.assignment_products == 100_000 * 196
    assert small.tour_products == 196**2
    assert small.warnings(config()) == []
    edge = ClusterCost.of(20_000 * 512, config())
    assert (edge.clusters, edge.levels) == (20_000, 1)
    assert "exact_clusters" in " ".join(edge.warnings(config()))
    large = ClusterCost.of(100_000_000, config())
    assert (large.clusters, large.levels, large.sample) == (195_313, 2, 1_000_000)
    assert large.assignment_products == 100_000_000 * (442 + 8 * 442)
    once = 101 * (442 + 442) + 11 * (442 + 8 * 442)
    assert large.kmeans_products == 3 * 2 * 1_000_000 * once
    assert large.tour_products == large.clusters * (442 + 8 * 442)
    (few,) = large.warnings(config())
    assert "5.1 pairs for each of 195,313 clusters" in few
    assert "clusters.pairs_per_cluster to 3,901" in few
    assert ClusterCost.of(100_000_000, config(pairs_per_cluster=3901)).warnings(config()) == []
    assert ClusterCost.of(100_000, config(packing="random")).tour_products == 0
    # Fewer than 39 pairs a cluster are no fault of a sample that has all rows.
    assert ClusterCost.of(1000, config(pairs_per_cluster=5)).warnings(config()) == []

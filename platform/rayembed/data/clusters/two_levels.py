"""Cluster pairs in two steps, first into groups and then within each group, where there are too
many clusters to compare all.

About √k groups first, then the clusters within each group, so that k-means, the assignment of pairs
and the tour cost √k times where one level costs k times. What it loses is measured
(`benchmarks/data_scale_mining.py`, benchmarks/log).

n rows, k clusters, g groups, W their width.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.data.clusters.kmeans import both_orders, kmeans, nearest, nearest_few

PROBES = 8
"""Number of nearest groups whose clusters a row is compared with."""

REFINEMENTS = 10
"""Iterations of k-means over all rows and clusters, after k-means within each group."""

_NEIGHBOURS = 32
"""Nearest neighbours of a cluster that are searched before the tour."""

_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True)
class Groups:
    """Groups of similar clusters, whose centroids are stored group by group."""

    centroids: np.ndarray
    """(g, W) float32 unit vectors."""
    first: np.ndarray
    """(g + 1,) int64: group i has the clusters `first[i]` to before `first[i + 1]`."""

    def of(self, cluster: np.ndarray) -> np.ndarray:
        """(n,) int64 group number of each of the given clusters."""
        return np.asarray(np.searchsorted(self.first, cluster, side="right") - 1)


def num_groups(num_clusters: int) -> int:
    """Number of groups for a number of clusters: its square root, rounded up."""
    return math.isqrt(num_clusters - 1) + 1


def cluster_in_groups(
    queries: np.ndarray,
    documents: np.ndarray,
    num_clusters: int,
    *,
    iterations: int,
    seed: int,
    device: str = "cpu",
) -> tuple[np.ndarray, Groups, float]:
    """Run `kmeans.cluster_pairs` in two steps; return (k, W) centroids, their groups, and the rows'
    mean cosine with their nearest centroid.

    A group gets clusters in proportion to its rows. Then all rows move all centroids in some more
    iterations, since rows at the edge of a group are often nearer to clusters of another.
    """
    rows = both_orders(queries, documents)
    asked: dict[str, Any] = {"iterations": iterations, "device": device}
    coarse = kmeans(rows, num_groups(num_clusters), seed=seed, **asked)
    group = nearest(rows, coarse, device)[0]
    counts = np.bincount(group, minlength=len(coarse))
    shares = _shares(counts, num_clusters)
    by_group = np.split(np.argsort(group, kind="stable"), np.cumsum(counts)[:-1])
    found = [np.empty((0, rows.shape[1]), np.float32)]
    for number, (members, share) in enumerate(zip(by_group, shares.tolist(), strict=True)):
        if share:
            found.append(kmeans(rows[members], share, seed=(seed + 1 + number) % 2**31, **asked))
    centroids, groups = (
        np.concatenate(found),
        Groups(coarse, np.concatenate([[0], shares.cumsum()])),
    )
    for _ in range(REFINEMENTS):
        cluster = nearest_in_groups(rows, centroids, groups, device)[0]
        centroids = _means(rows, cluster, centroids)
    cosine = nearest_in_groups(rows, centroids, groups, device)[1]
    return centroids, groups, float(cosine.mean(dtype=np.float64))


def _means(rows: np.ndarray, cluster: np.ndarray, before: np.ndarray) -> np.ndarray:
    """(k, W) float32 unit means of each cluster's rows; a cluster without rows keeps its
    centroid.
    """
    sums = np.zeros(before.shape, np.float64)
    order = np.argsort(cluster, kind="stable")
    for first in range(0, len(order), _ROWS_AT_ONCE):
        some = order[first : first + _ROWS_AT_ONCE]
        starts = np.flatnonzero(np.diff(cluster[some], prepend=-1))
        sums[cluster[some[starts]]] += np.add.reduceat(rows[some], starts, dtype=np.float64)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    there = lengths[:, 0] > 0
    found = before.copy()
    found[there] = sums[there] / lengths[there]
    return found


def _shares(counts: np.ndarray, total: int) -> np.ndarray:
    """(g,) int64 number of clusters for each group, proportional to its rows; the numbers sum to
    `total`.
    """
    least, most = np.minimum(counts, 1), counts
    exact = counts * (total / counts.sum())
    shares: np.ndarray = np.clip(np.floor(exact).astype(np.int64), least, most)
    # By the largest remainders; a few rounds where limits hold some back.
    while (missing := total - int(shares.sum())) != 0:
        step = 1 if missing > 0 else -1
        free = np.flatnonzero(shares < most if step > 0 else shares > least)
        order = free[np.argsort(-step * (exact - shares)[free], kind="stable")]
        shares[order[: abs(missing)]] += step
    return shares


def nearest_in_groups(
    rows: np.ndarray, centroids: np.ndarray, groups: Groups, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest centroid among the `PROBES` nearest groups of each row: (n,) int64 centroid
    numbers, ties by lower number, and (n,) float32 inner products. Arguments as of
    `kmeans.nearest`.
    """
    there = np.flatnonzero(np.diff(groups.first))  # a group without clusters takes no rows
    probes = min(PROBES, len(there))
    near = there[nearest_few(rows, groups.centroids[there], probes, device)[0]]
    asker = np.repeat(np.arange(len(rows)), probes)
    order = np.argsort(near.ravel(), kind="stable")
    of_group = near.ravel()[order]
    numbers = np.zeros(len(rows), np.int64)
    products = np.full(len(rows), -np.inf, np.float32)
    edges = np.searchsorted(of_group, np.arange(len(groups.first)))
    for number in there.tolist():
        members = asker[order[edges[number] : edges[number + 1]]]
        if not len(members):
            continue
        first, stop = groups.first[number : number + 2].tolist()
        found, of_found = nearest(rows[members], centroids[first:stop], device)
        better = of_found > products[members]
        numbers[members[better]] = found[better] + first
        products[members[better]] = of_found[better]
    return numbers, products


def tour_of_groups(
    centroids: np.ndarray, cluster: np.ndarray, groups: Groups, rng: np.random.Generator
) -> np.ndarray:
    """Order clusters as `kmeans.greedy_tour` does, but compare each only with clusters of its
    `PROBES` nearest groups; returns (m,) int64 indices into `cluster`.

    Args:
        centroids: (m, W) of the clusters to visit.
        cluster: (m,) int64 their numbers, ascending.
    """
    count = len(cluster)
    first = np.searchsorted(cluster, groups.first)
    neighbours = _neighbours(centroids, first, groups.centroids)
    left = np.diff(first)
    group = np.repeat(np.arange(len(left)), left)
    free = np.ones(count, dtype=bool)
    tour = np.empty(count, dtype=np.int64)
    tour[0] = here = int(rng.integers(count))
    free[here] = False
    left[group[here]] -= 1
    for place in range(1, count):
        near = neighbours[here]
        open_ = free[near]
        if open_.any():
            here = int(near[open_.argmax()])
        else:
            here = _nearest_free(centroids, here, free, first, left, groups.centroids)
        tour[place] = here
        free[here] = False
        left[group[here]] -= 1
    return tour


def _nearest_free(
    centroids: np.ndarray,
    here: int,
    free: np.ndarray,
    first: np.ndarray,
    left: np.ndarray,
    of_groups: np.ndarray,
) -> int:
    """Find the most similar cluster that is not yet in the order, in the nearest groups that still
    have one.
    """
    open_ = np.flatnonzero(left)
    near = open_[np.argsort(-(of_groups[open_] @ centroids[here]), kind="stable")[:PROBES]]
    places = np.concatenate([np.arange(first[one], first[one + 1]) for one in np.sort(near)])
    places = places[free[places]]
    return int(places[(centroids[places] @ centroids[here]).argmax()])


def _neighbours(centroids: np.ndarray, first: np.ndarray, of_groups: np.ndarray) -> np.ndarray:
    """(m, at most `_NEIGHBOURS`) int64 clusters nearest to each cluster, itself included, among its
    nearest groups; best first, ties by lower number.
    """
    there = np.flatnonzero(np.diff(first))
    probes = min(PROBES, len(there))
    near = there[nearest_few(centroids, of_groups[there], probes)[0]]
    kept = min(_NEIGHBOURS, len(centroids))
    # Where fewer are found, the cluster itself fills up: it is never free when it is asked for.
    numbers = np.repeat(np.arange(len(centroids))[:, None], kept, axis=1)
    products = np.full(numbers.shape, -np.inf, np.float32)
    for number in there.tolist():
        start, stop = first[number : number + 2].tolist()
        askers = np.flatnonzero((near == number).any(1))
        if not len(askers):
            continue
        found, of_found = nearest_few(
            centroids[askers], centroids[start:stop], min(kept, stop - start)
        )
        both = np.concatenate([numbers[askers], found + start], axis=1)
        scores = np.concatenate([products[askers], of_found], axis=1)
        order = np.lexsort((both, -scores), axis=1)[:, :kept]
        numbers[askers] = np.take_along_axis(both, order, 1)
        products[askers] = np.take_along_axis(scores, order, 1)
    return numbers

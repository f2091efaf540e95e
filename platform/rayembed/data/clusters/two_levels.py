"""Clusters in two levels, for more of them than can each be compared with all others.

About √k groups first, then the clusters within each group, so that k-means, the assignment of pairs
and the tour cost √k times where one level costs k times. What it loses is measured
(`benchmarks/data_scale_mining.py`, docs/LOG.md).

n rows, k clusters, g groups, W their width.
"""

import math
from dataclasses import dataclass

import numpy as np

from rayembed.data.clusters.kmeans import both_orders, greedy_tour, kmeans, nearest


@dataclass(frozen=True)
class Groups:
    """Groups of clusters whose centroids stand group by group."""

    centroids: np.ndarray
    """(g, W) float32 unit vectors."""
    first: np.ndarray
    """(g + 1,) int64: group i has the clusters `first[i]` to before `first[i + 1]`."""

    def of(self, cluster: np.ndarray) -> np.ndarray:
        """(n,) int64 group of each cluster."""
        return np.asarray(np.searchsorted(self.first, cluster, side="right") - 1)


def num_groups(num_clusters: int) -> int:
    """Groups of so many clusters: their square root."""
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
    """Centroids (k, W) of both orders of each pair, their groups, and the mean cosine of the rows
    with the centroid that `nearest_in_groups` gives them; see `kmeans.cluster_pairs`.

    A group gets clusters in proportion to its rows.
    """
    rows = both_orders(queries, documents)
    coarse = kmeans(rows, num_groups(num_clusters), iterations=iterations, seed=seed, device=device)
    group = nearest(rows, coarse, device)[0]
    counts = np.bincount(group, minlength=len(coarse))
    shares = _shares(counts, num_clusters)
    by_group = np.split(np.argsort(group, kind="stable"), np.cumsum(counts)[:-1])
    found = [np.empty((0, rows.shape[1]), np.float32)]
    total = 0.0
    for number, (members, share) in enumerate(zip(by_group, shares.tolist(), strict=True)):
        if share:
            inside = rows[members]
            fine = kmeans(
                inside,
                share,
                iterations=iterations,
                seed=(seed + 1 + number) % 2**31,
                device=device,
            )
            found.append(fine)
            total += float(nearest(inside, fine, device)[1].sum(dtype=np.float64))
    groups = Groups(coarse, np.concatenate([[0], np.cumsum(shares)]))
    return np.concatenate(found), groups, total / len(rows)


def _shares(counts: np.ndarray, total: int) -> np.ndarray:
    """(g,) int64 clusters of each group, which add up to `total`: proportional to its rows, at
    least one where it has any and at most its rows; `total` lies between both sums.
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
    """Nearest centroid within each row's nearest group: numbers (n,) int64, products (n,) float32.

    Groups without clusters take no rows. Arguments as of `kmeans.nearest`.
    """
    there = np.flatnonzero(np.diff(groups.first))
    group = there[nearest(rows, groups.centroids[there], device)[0]]
    numbers = np.empty(len(rows), np.int64)
    products = np.empty(len(rows), np.float32)
    order = np.argsort(group, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        if len(members):
            number = int(group[members[0]])
            first, stop = groups.first[number : number + 2].tolist()
            found, products[members] = nearest(rows[members], centroids[first:stop], device)
            numbers[members] = found + first
    return numbers, products


def tour_of_groups(
    centroids: np.ndarray, cluster: np.ndarray, groups: Groups, rng: np.random.Generator
) -> np.ndarray:
    """Tour of clusters, (m,) int64 places in `cluster`: greedily from group to group, and within
    each from the cluster that is nearest to the one before.

    Args:
        centroids: (m, W) of the clusters to visit.
        cluster: (m,) int64 their numbers, ascending.
    """
    visited, place = np.unique(groups.of(cluster), return_inverse=True)
    first = np.searchsorted(place, np.arange(len(visited) + 1))
    start = int(rng.integers(len(visited)))
    tour: list[np.ndarray] = []
    for group in greedy_tour(groups.centroids[visited], start).tolist():
        inside = centroids[first[group] : first[group + 1]]
        begin = int((inside @ centroids[tour[-1][-1]]).argmax()) if tour else 0
        tour.append(first[group] + greedy_tour(inside, begin))
    return np.concatenate(tour)

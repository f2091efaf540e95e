"""Packing of clusters of any size into batches of equal size (arXiv 2410.02525, section 4.1).

k clusters, n rows, G pairs of a batch.
"""

from typing import Literal

import numpy as np

from rayembed.data.clusters.kmeans import require_faiss

_NEIGHBOURS = 64
"""Nearest neighbours of each cluster that one matrix product finds in advance. When all of them are
used, the remaining clusters are compared one at a time."""


def order_clusters(
    centroids: np.ndarray, method: Literal["random", "tsp"], rng: np.random.Generator
) -> np.ndarray:
    """Tour of the clusters, (k,) int64.

    `random`: random order. `tsp`: from a random cluster on, each is followed by the remaining one
    with the highest cosine (greedy travelling salesman; the paper takes it from Shi et al., 2024).

    Args:
        centroids: (k, W) float32 of unit length.
    """
    if method == "random":
        return rng.permutation(len(centroids))
    return _greedy_tour(centroids, int(rng.integers(len(centroids))))


def _greedy_tour(centroids: np.ndarray, start: int) -> np.ndarray:
    """Greedy nearest-neighbour tour, identical to comparing with all remaining clusters at each
    step; 20,000 clusters of 2 × 768 took 12 to 22 s on two cores.
    """
    count = len(centroids)
    neighbours = _neighbours(centroids)
    free = np.ones(count, dtype=bool)
    left = np.arange(count)
    block = centroids
    tour = np.empty(count, dtype=np.int64)
    tour[0] = here = start
    free[here] = False
    for place in range(1, count):
        near = neighbours[here]
        open_ = free[near]
        if open_.any():
            here = int(near[open_.argmax()])
        else:
            if count - place < len(left) // 2:  # few of them are left: the others are put away
                left = left[free[left]]
                block = centroids[left]
            products = np.where(free[left], block @ centroids[here], -np.inf)
            here = int(left[products.argmax()])
        tour[place] = here
        free[here] = False
    return tour


def _neighbours(centroids: np.ndarray) -> np.ndarray:
    """(k, m) int64 nearest clusters of each, best first, ties by lower number."""
    index = require_faiss().IndexFlatIP(centroids.shape[1])
    index.add(centroids)
    products, numbers = index.search(centroids, min(_NEIGHBOURS, len(centroids)))
    order = np.lexsort((numbers, -products), axis=1)
    return np.asarray(np.take_along_axis(numbers, order, axis=1))


def pack(cluster: np.ndarray, keys: np.ndarray, tour: np.ndarray, batch_pairs: int) -> np.ndarray:
    """(batches, G) int64 row numbers, batch after batch along the tour.

    A cluster that fills whole batches gives them, and its remainder is joined with the remainders
    of its neighbours on the tour, which are cut into batches together. Rows at the end of the tour
    that do not fill a batch are dropped.

    Args:
        cluster: (n,) int64 number of each row's cluster.
        keys: (n,) by which rows of a cluster are ordered.
        tour: the clusters that have rows, each once, and any others.
        batch_pairs: G.
    """
    place = np.empty(int(tour.max(initial=-1)) + 1, dtype=np.int64)
    place[tour] = np.arange(len(tour))
    place = place[cluster]
    rows = np.lexsort((keys, place))
    sizes = np.bincount(place, minlength=len(tour))
    within = np.arange(len(rows)) - np.repeat(sizes.cumsum() - sizes, sizes)
    whole = within < np.repeat(sizes // batch_pairs * batch_pairs, sizes)
    rest = np.flatnonzero(~whole)
    rest = rest[: len(rest) // batch_pairs * batch_pairs]
    batches = np.concatenate([np.flatnonzero(whole), rest]).reshape(-1, batch_pairs)
    return np.asarray(rows[batches[np.argsort(batches[:, 0])]])

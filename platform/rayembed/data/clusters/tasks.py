"""Clustering tasks: find centroids on a sample of pairs, assign each pair to a cluster, mark false
negatives.

Those of a batch are S(q, d) = {d' | f(q, d') ≥ f(q, d) + ε} (arXiv 2410.02525, section 4.1), f the
teacher's cosine. B pairs of a batch, D embedding width.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.array_files import (
    load_array,
    load_arrays,
    map_array,
    save_array,
    save_arrays,
)
from rayembed.assets.storage import is_remote, join, open_storage, with_ending
from rayembed.data.clusters.kmeans import cluster_pairs, joined, nearest
from rayembed.data.clusters.two_levels import Groups, cluster_in_groups, nearest_in_groups
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part, PartItem, remedy
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import nth_smallest, seeded_keys
from rayembed.data.vectors.embed import Vectors

_READ_AT_ONCE = 8
"""Parts whose vectors are read at a time while a sample is taken."""

_RANDOM_BATCHES = 100
"""Random batches of the sample that serve as baseline for clustered ones."""


@dataclass(frozen=True)
class Sample:
    """Random sample of rows over all parts: the rows with the smallest seeded hash keys."""

    seed: int
    size: int
    last_key: int
    """Largest row key in the sample."""

    @classmethod
    def of(cls, id_hash: np.ndarray, size: int, seed: int) -> "Sample":
        """Draw a sample of `size` rows, given the (n,) id hashes of all rows; take all rows if
        there are fewer.
        """
        size = min(size, len(id_hash))
        return cls(seed, size, nth_smallest(lambda: chunks_of_keys(id_hash, seed), size))


_ROWS_AT_ONCE = 1 << 17


def chunks_of_keys(id_hash: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Yield the `sample_keys` of all rows in consecutive chunks."""
    for first in range(0, len(id_hash), _ROWS_AT_ONCE):
        yield sample_keys(id_hash[first : first + _ROWS_AT_ONCE], seed)


def sample_keys(id_hash: np.ndarray, seed: int) -> np.ndarray:
    """(n,) uint64 random keys that decide which rows are sampled, and the order of rows within a
    cluster.
    """
    return seeded_keys(id_hash, seed, "clusters")


def pair_vectors(vectors: Vectors, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """(n, D) float16 vectors of the queries in a Parquet part, and of each row's first positive."""
    texts = vectors.texts(part)
    return vectors.queries(part), vectors.documents(part)[texts.place[texts.first[:-1]]]


def vectors_of_positives(vectors: Vectors, part: Part) -> list[np.ndarray]:
    """Return for each row of a Parquet part the (p, D) float16 vectors of its p positives, in their
    order.
    """
    texts = vectors.texts(part)
    return np.split(vectors.documents(part)[texts.place], texts.first[1:-1])


def sample_vectors(
    vectors: Vectors, parts: Sequence[Part], sample: Sample
) -> tuple[np.ndarray, np.ndarray]:
    """(m, D) float16 query and document vectors of a sample, ordered by key."""

    def chosen_of(part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        key = sample_keys(read_column([part], "id_hash"), sample.seed)
        chosen = np.flatnonzero(key <= np.uint64(sample.last_key))
        if not len(chosen):
            return None
        query, document = pair_vectors(vectors, part)
        return key[chosen], query[chosen], document[chosen]

    found = []
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        for first in range(0, len(parts), _READ_AT_ONCE):
            some = pool.map(chosen_of, parts[first : first + _READ_AT_ONCE])
            found += [of_part for of_part in some if of_part is not None]
    keys, queries, documents = zip(*found, strict=True)
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.concatenate(queries)[order], np.concatenate(documents)[order]


@dataclass(frozen=True)
class Restart:
    """Work item: one k-means run from its own random initial centroids."""

    number: int

    @property
    def key(self) -> str:
        """Number of the k-means run, which identifies the work item."""
        return str(self.number)


@dataclass(frozen=True)
class FindCentroids:
    """Task: run k-means on the sample once, and save the centroids in a file.

    Memory is that of the sample, whatever the number of parts.
    """

    folder: str
    vectors: Vectors
    parts: tuple[Part, ...]
    sample: Sample
    num_clusters: int
    iterations: int
    batch_pairs: int
    levels: int = 1
    """2: the clusters are made in groups, which are saved beside the centroids."""

    def __call__(self, item: Restart, device: str = "cpu") -> Result:
        """Run k-means; return its `objective`, the name of the centroid `file`, and `random`, the
        mean similarities of random batches for comparison.
        """
        queries, documents = sample_vectors(self.vectors, self.parts, self.sample)
        text = f"{self.sample.seed}\0k-means\0{item.number}"
        asked: dict[str, Any] = {
            "iterations": self.iterations,
            "seed": xxhash.xxh3_64_intdigest(text.encode()) % 2**31,
            "device": device,
        }
        file = f"centroids-{item.number}.npy"
        path = join(self.folder, file)
        if self.levels == 1:
            centroids, objective = cluster_pairs(queries, documents, self.num_clusters, **asked)
        else:
            centroids, groups, objective = cluster_in_groups(
                queries, documents, self.num_clusters, **asked
            )
            save_arrays(_groups_path(path), centroids=groups.centroids, first=groups.first)
        save_array(path, centroids)
        size = min(self.batch_pairs, len(queries))
        firsts = range(0, len(queries) - size + 1, size)[:_RANDOM_BATCHES]
        return {
            "objective": objective,
            "file": file,
            "random": [
                mean_similarity(queries[first : first + size], documents[first : first + size])
                for first in firsts
            ],
        }


@dataclass(frozen=True)
class AssignPart:
    """Task: assign each pair of a Parquet part to a cluster by its concatenation ψ(q)⊕φ(d)."""

    folder: str
    vectors: Vectors
    centroids: str
    """Path of the centroids."""
    digest: str
    """Digest of the centroids: a process that has others of this path loads these."""
    in_groups: bool = False
    """Whether the centroids are those of clusters in groups: only those of the nearest group are
    compared."""

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Assign the part's pairs; return row counts, the name of the `file` with (rows,) int32
        clusters, and the sum of the pairs' `cosine` with their centroids.
        """
        queries, documents = pair_vectors(self.vectors, item.part)
        centroids, groups = _clusters(self.centroids, self.digest, self.in_groups)
        pairs = joined(queries, documents)
        if groups is not None:
            cluster, cosine = nearest_in_groups(pairs, centroids, groups, device)
        else:
            cluster, cosine = nearest(pairs, centroids, device)
        file = f"assigned/{item.key}.npy"
        save_array(join(self.folder, file), cluster.astype(np.int32))
        rows = item.part.rows
        return {
            "rows_in": rows,
            "rows_out": rows,
            "rejected": {},
            "file": file,
            "cosine": float(cosine.sum(dtype=np.float64)),
        }


@lru_cache(maxsize=1)
def _clusters(path: str, _: str, in_groups: bool) -> tuple[np.ndarray, Groups | None]:
    """Load the centroids and their groups once for each process; a file on the local disk is
    memory-mapped. Raises as `load_made`.
    """
    if is_remote(path):
        found = load_made(path)
    else:
        found = map_array(Path(open_storage(path)[1]), remedy(path))
    return found, load_groups(path) if in_groups else None


def load_made(path: str) -> np.ndarray:
    """Load an array that an earlier task saved.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    return load_array(path, remedy(path))


def load_groups(centroids: str) -> Groups:
    """Load the groups of clusters that are saved next to the given centroids file; raises the same
    errors as `load_made`.
    """
    path = _groups_path(centroids)
    return Groups(**load_arrays(path, remedy(path)))


def _groups_path(centroids: str) -> str:
    return with_ending(centroids, ".groups.npz")


_TILE_QUERIES = 1024


def false_negatives(
    queries: np.ndarray,
    documents: np.ndarray,
    positives: Sequence[Sequence[int]],
    margin: float,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Find the false negatives of each query among its batch's documents.

    Known positives of the query, including its own document, are left out, as they are never
    negatives. A pair with several positives trains them in turn, so that each is a document of the
    batch, and the one with the lowest score is its d.

    Args:
        queries: (B, D) of unit length.
        documents: (M, D) of unit length: the positives of each pair, pair after pair.
        positives: (B) `normalised_hash` of the positives of each pair.
        margin: ε.

    Returns:
        Of each pair the sorted distinct `normalised_hash` of S(q, d), and (B,) int64: of the other
        pairs of the batch, those of which a document is in S(q, d).
    """
    left = np.asarray(queries, dtype=np.float32)
    right = np.asarray(documents, dtype=np.float32)
    texts = np.array([one for hashes in positives for one in hashes], dtype=np.int64)
    number = np.array([len(hashes) for hashes in positives], dtype=np.int64)
    firsts = np.cumsum(number) - number
    owner = np.repeat(np.arange(len(left)), number)
    found, counts = [], np.zeros(len(left), dtype=np.int64)
    for start in range(0, len(left), _TILE_QUERIES):
        some = left[start : start + _TILE_QUERIES]
        own = np.arange(start, start + len(some))
        scores = some @ right.T
        # The pair's own scores are read from the same product, so that equal vectors tie.
        mine = np.where(owner == own[:, None], scores, np.float32(np.inf))
        reached = scores >= mine.min(axis=1, keepdims=True) + np.float32(margin)
        for row in own.tolist():
            false = reached[row - start] & ~np.isin(texts, positives[row])
            counts[row] = np.logical_or.reduceat(false, firsts).sum()
            found.append(np.unique(texts[false]))
    return found, counts


def mean_similarity(queries: np.ndarray, documents: np.ndarray) -> float:
    """Mean cosine of each query with the documents of the other pairs, which measures how hard a
    batch is.

    Args:
        queries: (B, D) of unit length; B at least 2, or the mean is 0.
        documents: (B, D) of unit length.
    """
    left = np.asarray(queries, dtype=np.float64)
    right = np.asarray(documents, dtype=np.float64)
    count = len(left)
    if count < 2:
        return 0.0
    # The sum over all pairs of vectors is the product of their sums.
    others = left.sum(0) @ right.sum(0) - (left * right).sum()
    return float(others / (count * (count - 1)))

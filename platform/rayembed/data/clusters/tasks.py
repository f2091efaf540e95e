"""Clustering tasks: centroids from a sample of pairs, and the cluster of each pair."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rayembed.assets.array_files import load_array, save_array
from rayembed.assets.storage import join
from rayembed.data.clusters.false_negatives import mean_similarity
from rayembed.data.clusters.kmeans import cluster_pairs, joined, nearest
from rayembed.data.hashes import seeded_keys
from rayembed.data.parts import Part, read_index, remedy
from rayembed.data.vectors.embed import PartItem, Vectors
from rayembed.data.work_items import Result

_RANDOM_BATCHES = 100
"""Random batches of the sample that serve as baseline for clustered ones."""


@dataclass(frozen=True)
class Sample:
    """Seeded row sample: the rows with the smallest keys, over all parts."""

    seed: int
    size: int
    last_key: int
    """Largest row key in the sample."""

    @classmethod
    def of(cls, id_hash: np.ndarray, size: int, seed: int) -> "Sample":
        """Sample `size` of the rows with these (n,) id hashes; all if fewer."""
        keys = sample_keys(id_hash, seed)
        size = min(size, len(keys))
        return cls(seed, size, int(np.partition(keys, size - 1)[size - 1]))


def sample_keys(id_hash: np.ndarray, seed: int) -> np.ndarray:
    """(n,) uint64 keys that decide sampling and the order within a cluster."""
    return seeded_keys(id_hash, seed, "clusters")


def pair_vectors(vectors: Vectors, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """(n, D) float16 vectors of a part's queries, and of each row's first positive."""
    texts = vectors.texts(part)
    return vectors.queries(part), vectors.documents(part)[texts.place[texts.first[:-1]]]


def sample_vectors(
    vectors: Vectors, parts: Sequence[Part], sample: Sample
) -> tuple[np.ndarray, np.ndarray]:
    """(m, D) float16 query and document vectors of a sample, ordered by key."""
    keys, queries, documents = [], [], []
    for part in parts:
        key = sample_keys(read_index([part]).id_hash, sample.seed)
        chosen = np.flatnonzero(key <= np.uint64(sample.last_key))
        if len(chosen):
            query, document = pair_vectors(vectors, part)
            keys.append(key[chosen])
            queries.append(query[chosen])
            documents.append(document[chosen])
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.concatenate(queries)[order], np.concatenate(documents)[order]


@dataclass(frozen=True)
class Restart:
    """Work item: one k-means run with its own initial centroids."""

    number: int

    @property
    def key(self) -> str:
        """Number of the run."""
        return str(self.number)


@dataclass(frozen=True)
class FindCentroids:
    """Task: one k-means run on the sample; its centroids are saved in a file.

    Memory is that of the sample, whatever the number of parts.
    """

    folder: str
    vectors: Vectors
    parts: tuple[Part, ...]
    sample: Sample
    num_clusters: int
    iterations: int
    batch_pairs: int

    def __call__(self, item: Restart, device: str = "cpu") -> Result:
        """Report `objective`, centroid `file` and `random`, the mean similarities of random
        batches.
        """
        queries, documents = sample_vectors(self.vectors, self.parts, self.sample)
        text = f"{self.sample.seed}\0k-means\0{item.number}"
        found = cluster_pairs(
            queries,
            documents,
            self.num_clusters,
            iterations=self.iterations,
            seed=xxhash.xxh3_64_intdigest(text.encode()) % 2**31,
            device=device,
        )
        path = join(self.folder, f"centroids-{item.number}.npy")
        save_array(path, found.centroids)
        size = min(self.batch_pairs, len(queries))
        firsts = range(0, len(queries) - size + 1, size)[:_RANDOM_BATCHES]
        return {
            "objective": found.objective,
            "file": path,
            "random": [
                mean_similarity(queries[first : first + size], documents[first : first + size])
                for first in firsts
            ],
        }


@dataclass(frozen=True)
class AssignPart:
    """Task: assign each pair of a part to a cluster by its concatenation ψ(q)⊕φ(d)."""

    folder: str
    vectors: Vectors
    centroids: str
    """Path of the centroids."""

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Report counts, the `file` of (rows,) int32 clusters, and the sum of `cosine` with the
        centroids.
        """
        queries, documents = pair_vectors(self.vectors, item.part)
        centroids = load_made(self.centroids)
        cluster, cosine = nearest(joined(queries, documents), centroids, device)
        path = join(self.folder, "assigned", f"{item.key}.npy")
        save_array(path, cluster.astype(np.int32))
        rows = item.part.rows
        return {
            "rows_in": rows,
            "rows_out": rows,
            "rejected": {},
            "file": path,
            "cosine": float(cosine.sum(dtype=np.float64)),
        }


def load_made(path: str) -> np.ndarray:
    """Load an array that a task wrote.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    return load_array(path, remedy(path))

"""Measure how hard batches are for a surrogate model, by cluster size and batch size (arXiv
2410.02525, Figure 6).

"We measure the average difficulty of 1000 batches across a variety of batch and cluster sizes"
(arXiv 2410.02525, section 7). The paper does not define the measure; here it is the cosine, by the
teacher that made the clusters, of each query with the documents of the other pairs of its batch.

n pairs, B pairs of a batch, D embedding width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.document import fingerprint
from rayembed.config.mining import ClusterConfig
from rayembed.data.clusters.kmeans import (
    cluster_pairs,
    joined,
    nearest,
    order_clusters,
)
from rayembed.data.clusters.packing import pack
from rayembed.data.clusters.tasks import Sample, sample_vectors
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.vectors.embed import Vectors, embed_parts
from rayembed.search.faiss_library import require_faiss

CODE_VERSION = 1
"""Code version of the measurement; raise it when the same inputs yield other figures."""

RANDOM = "random"
"""Placeholder for the cluster size: randomly ordered batches."""

_TILE_QUERIES = 1024
_DIGITS = 6


@dataclass(frozen=True)
class Difficulty:
    """Similarity of queries to other pairs' documents, for several batches of one size."""

    means: tuple[float, ...]
    """Mean cosine of a query with the other pairs' documents."""
    left: tuple[float, ...]
    """Mean cosine with the documents that the filter keeps as negatives; 0 if it keeps none."""
    masked: tuple[float, ...]
    """Share of the other pairs' documents that the filter masks."""

    @property
    def mean(self) -> float:
        """Mean cosine with other pairs' documents, averaged over batches."""
        return float(np.mean(self.means))

    @property
    def deviation(self) -> float:
        """Standard deviation of the mean cosine over batches."""
        return float(np.std(self.means))

    @property
    def mean_left(self) -> float:
        """Mean cosine with the documents that the filter keeps, averaged over batches."""
        return float(np.mean(self.left))

    @property
    def masked_share(self) -> float:
        """Share of documents that the filter masks, averaged over batches."""
        return float(np.mean(self.masked))

    @classmethod
    def of(cls, values: Mapping[str, Sequence[float]]) -> "Difficulty":
        """Restore a difficulty from the JSON form of its fields."""
        return cls(**{name: tuple(values[name]) for name in ("means", "left", "masked")})

    def with_more(self, other: "Difficulty") -> "Difficulty":
        """Append the batches of another measurement."""
        return Difficulty(
            self.means + other.means, self.left + other.left, self.masked + other.masked
        )


def difficulty(
    queries: np.ndarray, documents: np.ndarray, batches: np.ndarray, margin: float | None
) -> Difficulty:
    """Measure the difficulty of batches.

    Args:
        queries: (n, D) of unit length.
        documents: (n, D) of unit length, one for each query.
        batches: (batches, B) rows; B at least 2.
        margin: ε of the false-negative filter; None: all others are negatives.
    """
    found = [_of_batch(queries[batch], documents[batch], margin) for batch in batches]
    means, left, masked = (tuple(round(one[i], _DIGITS) for one in found) for i in range(3))
    return Difficulty(means, left, masked)


def _of_batch(
    queries: np.ndarray, documents: np.ndarray, margin: float | None
) -> tuple[float, float, float]:
    """Return a batch's mean cosine over all other documents, mean over unmasked negatives, and
    share of masked documents.
    """
    left, right = np.asarray(queries, np.float32), np.asarray(documents, np.float32)
    total = kept_total = 0.0
    masked = 0
    for start in range(0, len(left), _TILE_QUERIES):
        some = left[start : start + _TILE_QUERIES]
        rows = np.arange(len(some))
        scores = some @ right.T
        others = np.ones(scores.shape, dtype=bool)
        others[rows, start + rows] = False
        total += scores.sum(where=others, dtype=np.float64)
        false = np.zeros_like(others)
        if margin is not None:
            # The pair's own score is read from the same product, so that equal vectors tie.
            own = scores[rows, start + rows]
            false = others & (scores >= own[:, None] + np.float32(margin))
        masked += int(false.sum())
        kept_total += scores.sum(where=others & ~false, dtype=np.float64)
    count = len(left) * (len(left) - 1)
    return total / count, kept_total / max(1, count - masked), masked / count


@dataclass(frozen=True)
class ClusterSize:
    """Work item: one mean cluster size; None stands for batches in random order."""

    pairs: int | None

    @property
    def key(self) -> str:
        """The cluster size as text."""
        return RANDOM if self.pairs is None else str(self.pairs)


@dataclass(frozen=True)
class MeasureBatches:
    """Task that clusters a sample of pairs by one size and packs it into batches of each batch
    size.

    Uses the methods of the clustering step. Memory is that of the sample.
    """

    dataset: str
    vectors: Vectors
    parts: tuple[Part, ...]
    sample: Sample
    config: ClusterConfig
    batch_sizes: tuple[int, ...]
    max_batches: int

    def __call__(self, item: ClusterSize, device: str = "cpu") -> Result:
        """Run the task; its result has `difficulty`: batch size → JSON form of `Difficulty`."""
        queries, documents = sample_vectors(self.vectors, self.parts, self.sample)
        grouped = self._grouped(item, queries, documents, device)
        found: dict[str, Any] = {}
        for size in self.batch_sizes:
            rng = self._generator(item, f"batches of {size}")
            batches = self._batches(grouped, len(queries), size, rng)
            if len(batches) > self.max_batches:
                batches = batches[rng.permutation(len(batches))[: self.max_batches]]
            margin = self.config.false_negative_margin
            found[str(size)] = vars(difficulty(queries, documents, batches, margin))
        return {"difficulty": found}

    def _grouped(
        self, item: ClusterSize, queries: np.ndarray, documents: np.ndarray, device: str
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Cluster the pairs; return the cluster of each and the order of clusters, None without
        clusters.
        """
        if item.pairs is None:
            return None
        number = -(-len(queries) // item.pairs)
        clusterings = [
            cluster_pairs(
                queries,
                documents,
                number,
                iterations=self.config.iterations,
                seed=int(self._generator(item, f"restart {restart}").integers(2**31)),
                device=device,
            )
            for restart in range(self.config.restarts)
        ]
        centroids, _ = max(clusterings, key=itemgetter(1))
        cluster = nearest(joined(queries, documents), centroids, device)[0]
        used = np.unique(cluster)
        rng = self._generator(item, "packing")
        return cluster, used[order_clusters(centroids[used], self.config.packing, rng)]

    def _batches(
        self,
        grouped: tuple[np.ndarray, np.ndarray] | None,
        count: int,
        size: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        if grouped is None:
            rows = rng.permutation(count)
            return rows[: count // size * size].reshape(-1, size)
        cluster, tour = grouped
        # The sample comes in the order of its keys.
        return pack(cluster, np.arange(count), tour, size)

    def _generator(self, item: ClusterSize, purpose: str) -> np.random.Generator:
        text = f"{self.sample.seed}\0{self.dataset}\0{item.key}\0{purpose}"
        return np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(text.encode())))


def measure_batches(
    context: PipelineContext,
    dataset: DatasetConfig,
    records: DatasetArtifact,
    *,
    cluster_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    max_pairs: int,
    max_batches: int,
) -> dict[int | None, dict[int, Difficulty]]:
    """Measure batches: mean cluster size (None: random order) → batch size → difficulty.

    Results are stored and reused.

    Args:
        records: the folder that would be clustered.
        max_pairs: larger data sets are sampled by a seed to this number before clustering.
        max_batches: of one size of clusters and of batches; a seeded draw of more.
    """
    config = dataset.clusters
    assert config is not None
    require_faiss("clusters")
    vectors = embed_parts(context, dataset.name, records.parts, config)
    sample = Sample.of(read_column(records.parts, "id_hash"), max_pairs, context.seed)
    inputs = {
        "code": CODE_VERSION,
        "settings": config.model_dump(
            mode="json", exclude={"teacher", "batch_pairs", "pairs_per_cluster"}
        ),
        "teacher": vectors.weights,
        "records": records.fingerprint,
        "sample": [sample.seed, sample.size],
        "batches": [list(batch_sizes), max_batches],
    }
    folder = join(context.storage, "data", "difficulty", f"{dataset.name}-{fingerprint(inputs)}")
    task = MeasureBatches(
        dataset.name,
        vectors,
        tuple(records.parts),
        sample,
        config,
        tuple(batch_sizes),
        max_batches,
    )
    items = [ClusterSize(size) for size in (*cluster_sizes, None)]
    what = f"difficulty {dataset.name}"
    results = run_resumable(folder, what, task, items, context.execute, "gpu or machine")
    return {
        item.pairs: {
            int(size): Difficulty.of(values) for size, values in result["difficulty"].items()
        }
        for item, result in zip(items, results, strict=True)
    }

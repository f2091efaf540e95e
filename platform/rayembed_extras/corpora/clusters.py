"""Choose representative documents of a corpus, one from each cluster (arXiv 2410.02525, section
3.2).

N documents, k clusters, C width of their vectors.
"""

from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from rayembed.data.clusters.kmeans import nearest
from rayembed.models.contract import EmbeddingModel
from rayembed.models.passes.encoding import encode_context
from rayembed.search.faiss_library import require_faiss


def cluster_representatives(
    vectors: np.ndarray, number: int, *, seed: int, iterations: int = 20, device: str = "cpu"
) -> list[int]:
    """Ascending row numbers of the documents nearest to the centroids of spherical k-means.

    At most `number`: two centroids may have one nearest document.

    Args:
        vectors: (N, C), for instance the first stage's; of any length.
        number: k; all rows where there are fewer.

    Raises:
        ConfigError: FAISS is not installed.
    """
    if len(vectors) <= number:
        return list(range(len(vectors)))
    faiss = require_faiss("clusters")
    rows = np.array(vectors, dtype=np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    kmeans = faiss.Kmeans(
        rows.shape[1],
        number,
        niter=iterations,
        spherical=True,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(rows),
    )
    kmeans.train(rows)
    chosen, _ = nearest(kmeans.centroids, rows, device)
    return sorted({int(row) for row in chosen})


def clustered_context(
    model: EmbeddingModel,
    documents: Iterable[str],
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor | None:
    """Compute context vectors (n, C) of one document from each cluster of a corpus; None if the
    corpus is empty.

    As many clusters as the model takes context documents. The first stage embeds every document
    once, and k-means goes by its vectors.

    Args:
        progress: called with the number of documents embedded so far, and of all.

    Raises:
        ConfigError: FAISS is not installed.
    """
    distinct = [text for text in dict.fromkeys(documents) if text.strip()]
    if not distinct:
        return None
    number = len(distinct) if model.max_context is None else model.max_context
    if len(distinct) > number:
        require_faiss("clusters")  # before all are embedded
    vectors = encode_context(model, distinct, progress=progress)
    return vectors[cluster_representatives(vectors.numpy(), number, seed=seed)]

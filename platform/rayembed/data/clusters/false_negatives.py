"""False negatives within a batch, by the scores of a surrogate model.

S(q, d) = {d' | f(q, d') ≥ f(q, d) + ε} (arXiv 2410.02525, section 4.1), f the teacher's cosine.
B pairs of a batch, D embedding width.
"""

from collections.abc import Sequence

import numpy as np

_TILE_QUERIES = 1024


def false_negatives(
    queries: np.ndarray,
    documents: np.ndarray,
    positives: Sequence[Sequence[int]],
    margin: float,
) -> tuple[list[np.ndarray], np.ndarray]:
    """For each pair, the documents of the batch that are false negatives of its query.

    Known positives of the query, including its own document, are left out, as they are never
    negatives.

    Args:
        queries: (B, D) of unit length.
        documents: (B, D) of unit length: the first positive of each pair.
        positives: (B) `text_hash` of all positives of each pair, the document's first.
        margin: ε.

    Returns:
        Of each pair the sorted distinct `text_hash` of S(q, d), and (B,) int64: of the other pairs
        of the batch, those whose document is in S(q, d).
    """
    left = np.asarray(queries, dtype=np.float32)
    right = np.asarray(documents, dtype=np.float32)
    texts = np.array([hashes[0] for hashes in positives], dtype=np.int64)
    found, counts = [], np.zeros(len(left), dtype=np.int64)
    for start in range(0, len(left), _TILE_QUERIES):
        some = left[start : start + _TILE_QUERIES]
        own = np.arange(start, start + len(some))
        scores = some @ right.T
        # The pair's own score is read from the same product, so that equal vectors tie.
        limits = scores[np.arange(len(some)), own] + np.float32(margin)
        reached = scores >= limits[:, None]
        for row in own.tolist():
            false = reached[row - start] & ~np.isin(texts, positives[row])
            counts[row] = false.sum()
            found.append(np.unique(texts[false]))
    return found, counts


def mean_similarity(queries: np.ndarray, documents: np.ndarray) -> float:
    """Mean cosine of each query with the other pairs' documents: the difficulty of a batch.

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

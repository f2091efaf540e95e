"""Measure retrieval with old and new queries, old and new documents, and maps between them.

Q queries, R rows (texts with vectors) of N documents, K = 10 results. Search is exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.results.intervals import PairedDifference, mean_difference
from rayembed.search.exact import top_k
from rayembed_extras.indexing.judged_queries import scores_of

K = 10
_MOST_ROWS = 2_000
"""Rows that are looked at for a query at most, to get K distinct documents."""


@dataclass(frozen=True)
class QueryScores:
    """Recall and nDCG of single queries at K results, on a scale of 0 to 1."""

    recall: np.ndarray
    """(Q,) float64."""
    ndcg: np.ndarray
    """(Q,) float64."""


@dataclass(frozen=True)
class ShareKept:
    """Mean recall of one road as a share of another's, with its 95 % interval."""

    value: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def rank_documents(queries: np.ndarray, rows: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Rank documents by their best row: (Q, K) int64 documents, best first, padded by -1.

    Args:
        queries: (Q, D) float32 unit vectors.
        rows: (R, D) float32 unit vectors.
        owners: (R,) document of each row.
    """
    most = int(np.bincount(owners).max())
    _, found = top_k(queries, [rows], min(K * most, len(rows), max(K, _MOST_ROWS)))
    ranked = np.full((len(queries), K), -1, np.int64)
    if most == 1:
        width = min(K, found.shape[1])
        ranked[:, :width] = np.where(found[:, :width] < 0, -1, owners[found[:, :width]])
        return ranked
    for query, of_query in enumerate(found):
        distinct = dict.fromkeys(owners[of_query[of_query >= 0]].tolist())
        best = list(distinct)[:K]
        ranked[query, : len(best)] = best
    return ranked


def score(ranked: np.ndarray, relevant: Sequence[Mapping[int, int]]) -> QueryScores:
    """Compute recall@10 and nDCG@10 of rankings, as trec_eval defines them.

    Args:
        ranked: (Q, K) documents.
        relevant: for each query, grades above 0 by document.
    """
    pairs = zip(ranked.tolist(), relevant, strict=True)
    ndcg, recall = np.array([scores_of(row, judged, K) for row, judged in pairs]).T
    return QueryScores(recall, ndcg)


def as_judgements(ranked: np.ndarray) -> list[dict[int, int]]:
    """Turn rankings into judgements: each ranked document has grade 1."""
    return [{document: 1 for document in row if document >= 0} for row in ranked.tolist()]


def share_kept(scores: QueryScores, full: QueryScores) -> ShareKept | None:
    """Share of the full road's mean recall that another road keeps; None if that recall is 0.

    The interval is that of the paired difference to `share × full` over resampled queries
    (Fieller's way to a ratio), divided by the full road's recall.
    """
    whole = float(full.recall.mean())
    if whole == 0:
        return None
    value = float(scores.recall.mean()) / whole
    apart = difference(scores.recall, value * full.recall)
    low, high = apart.interval or (0.0, 0.0)
    return ShareKept(value, (value + low / whole, value + high / whole))


def difference(ours: np.ndarray, theirs: np.ndarray) -> PairedDifference:
    """Mean difference of (Q,) scores of the same queries, with its paired bootstrap interval."""
    mean = float(ours.mean() - theirs.mean())
    return mean_difference({"": mean}, {"": [ours.tolist()]}, {"": [theirs.tolist()]})

"""Rules that refuse likely positives among candidates (arXiv 2407.15831, section 4)."""

import numpy as np

from rayembed.config.mining import MarginPos, MaxScore, PercPos, Rule, TopK


def highest_scores(rule: Rule, positive_scores: np.ndarray) -> np.ndarray:
    """(Q,) float64 maximum score of a negative for each query.

    `top_k_perc_pos` takes `max_relative_score` times the positive's score if that is positive. A
    negative score is lowered by the same share of its size (-0.2 → -0.21 at 0.95), so that
    negatives always score below the positive; a product would exceed it.

    Args:
        positive_scores: (Q,) of the lowest-scoring positive of each query. All of them are marked
            as relevant, so what scores like the lowest is as likely relevant as that one is;
            contrastors and sentence-transformers take the lowest too.
    """
    scores = positive_scores.astype(np.float64)
    match rule:
        case TopK():
            return np.full(scores.shape, np.inf)
        case PercPos(max_relative_score=share):
            return np.asarray(scores - (1.0 - share) * np.abs(scores))
        case MarginPos(margin=margin):
            return np.asarray(scores - margin)
        case MaxScore(max_score=most):
            return np.full(scores.shape, most)

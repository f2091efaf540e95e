"""Rules that refuse likely positives among candidates (arXiv 2407.15831, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rayembed.config.mining import MiningRule

if TYPE_CHECKING:
    import numpy as np


class TopK(MiningRule):
    """Rule without a limit: every candidate may become a negative, whatever its score."""

    kind: Literal["top_k"] = "top_k"

    def highest_scores(self, positive_scores: np.ndarray) -> np.ndarray:
        """(Q,) float64 limits of candidates' scores: infinity for every query."""
        import numpy as np

        return np.full(positive_scores.shape, np.inf)


class PercPos(MiningRule):
    """Rule that refuses candidates above a share of the positive's score (arXiv 2407.15831,
    TopK-PercPos).
    """

    kind: Literal["top_k_perc_pos"] = "top_k_perc_pos"
    max_relative_score: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    """Share of the positive's score; a candidate above it is a likely positive."""

    def highest_scores(self, positive_scores: np.ndarray) -> np.ndarray:
        """(Q,) float64 limits of candidates' scores: `max_relative_score` times the positive's
        score, if that is above zero.

        A negative score is lowered by the same share of its size (-0.2 → -0.21 at 0.95), so that
        negatives always score below the positive; a product would exceed it.
        """
        import numpy as np

        scores = positive_scores.astype(np.float64)
        return np.asarray(scores - (1.0 - self.max_relative_score) * np.abs(scores))


class MarginPos(MiningRule):
    """Rule that refuses candidates above the positive's score minus a margin (arXiv 2407.15831,
    TopK-MarginPos).
    """

    kind: Literal["top_k_margin_pos"] = "top_k_margin_pos"
    margin: float = Field(default=0.05, ge=0.0, le=2.0)
    """Margin in units of cosine."""

    def highest_scores(self, positive_scores: np.ndarray) -> np.ndarray:
        """(Q,) float64 limits of candidates' scores: the positive's score minus `margin`."""
        return positive_scores.astype("float64") - self.margin


class MaxScore(MiningRule):
    """Rule that refuses candidates above a fixed score (arXiv 2407.15831, TopK-Abs)."""

    kind: Literal["top_k_abs"] = "top_k_abs"
    max_score: float = Field(default=0.7, ge=-1.0, le=1.0)
    """Cosine above which a candidate is a likely positive."""

    def highest_scores(self, positive_scores: np.ndarray) -> np.ndarray:
        """(Q,) float64 limits of candidates' scores: `max_score` for every query."""
        import numpy as np

        return np.full(positive_scores.shape, self.max_score)

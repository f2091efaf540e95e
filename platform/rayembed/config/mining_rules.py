"""Rules of mining: what a run asks of one, and the table of their kinds."""

from typing import TYPE_CHECKING, Any

from rayembed.config.settings import Settings
from rayembed.config.table import Table


class MiningRule(Settings):
    """Which candidates are likely positives, by a limit to their scores.

    Base class of the members of `MINING_RULES`.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table; the negatives that a rule lets pass are marked with it."""

    def highest_scores(self, positive_scores: Any) -> Any:
        """Highest score that a negative of each query may have; those above it are refused.

        Args:
            positive_scores: (Q,) float array, score of the lowest-scoring positive of each query by
                the model that scored the candidates. All positives are marked as relevant, so what
                scores like the lowest is as likely relevant as that one is; contrastors and
                sentence-transformers take the lowest too.

        Returns:
            (Q,) float64 array.
        """
        raise TypeError(f"{type(self).__name__} has no limit")


MINING_RULES = Table(
    "rayembed.mining_rules",
    MiningRule,
    (
        "rayembed.data.mining.rules:TopK",
        "rayembed.data.mining.rules:PercPos",
        "rayembed.data.mining.rules:MarginPos",
        "rayembed.data.mining.rules:MaxScore",
    ),
)
"""Kinds of rules. Their modules import numpy inside functions: settings are read before it is
needed."""

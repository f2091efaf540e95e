"""Applies the mining rule to a teacher's lists and orders what remains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rayembed.config.mining import MiningConfig
from rayembed.data.mining.candidates import Candidates, by_rule, draw_order, score_order
from rayembed.data.records import Record


@dataclass(frozen=True)
class RankedCandidates:
    """One teacher's lists after the rule. Q queries, C candidates."""

    candidates: Candidates
    scores: np.ndarray
    """(Q, C) float32 scores that the rule used: the teacher's or the cross-encoder's."""
    positive_scores: np.ndarray
    """(Q,) float32 score of the lowest-scoring positive, by the same model."""
    order: np.ndarray
    """(Q, C) columns in the order of selection; open candidates first."""
    rescored: bool
    """Whether `scores` come from the cross-encoder."""

    def documents(self) -> list[list[int]]:
        """Eligible document ids of each row, in the order of selection."""
        ids = np.take_along_axis(self.candidates.ids, self.order, 1)
        count = self.candidates.open.sum(1)
        return [of_row[:n].tolist() for of_row, n in zip(ids, count, strict=True)]


def rank_candidates(
    candidates: Candidates,
    scores: np.ndarray | None,
    positive_scores: np.ndarray,
    config: MiningConfig,
    salt: np.ndarray,
) -> RankedCandidates:
    """Apply the rule to candidate lists.

    Args:
        scores: (Q, C) of a cross-encoder; None: the teacher's decide.
        positive_scores: (Q,) of the lowest-scoring positives, by the model that decides.
        salt: (Q,) uint64, for uniform sampling.
    """
    deciding = candidates.scores if scores is None else scores
    left = by_rule(candidates, deciding, config.rule.highest_scores(positive_scores))
    uniform = config.sampling == "uniform"
    order = draw_order(left, salt) if uniform else score_order(left, deciding)
    return RankedCandidates(left, deciding, positive_scores, order, scores is not None)


def salts(records: Sequence[Record], seed: int, teacher: int) -> np.ndarray:
    """(Q,) uint64 salts that depend on seed, teacher and record id only."""
    of_rows = (f"{seed}\0mining {teacher}\0{record.id}".encode() for record in records)
    return np.array([xxhash.xxh3_64_intdigest(one) for one in of_rows], dtype=np.uint64)

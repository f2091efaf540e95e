"""What the rule leaves of a teacher's lists, in the order in which negatives are taken."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rayembed.config.mining import MiningConfig
from rayembed.data.mining.candidates import Candidates, by_rule, draw_order, score_order
from rayembed.data.mining.rules import highest_scores
from rayembed.data.records import Record


@dataclass(frozen=True)
class Decided:
    """One teacher's lists after the rule. Q queries, C places of a list."""

    candidates: Candidates
    scores: np.ndarray
    """(Q, C) float32 by which the rule decided: the teacher's or the cross-encoder's."""
    positive_scores: np.ndarray
    """(Q,) float32 of the lowest-scoring positives, by the same model."""
    order: np.ndarray
    """(Q, C) columns: open ones first, in the order in which they are taken."""
    rescored: bool
    """Whether `scores` are the cross-encoder's."""

    def documents(self) -> list[list[int]]:
        """For each row the ids that may be taken, the first one first."""
        ids = np.take_along_axis(self.candidates.ids, self.order, 1)
        count = self.candidates.open.sum(1)
        return [of_row[:n].tolist() for of_row, n in zip(ids, count, strict=True)]


def decide(
    candidates: Candidates,
    scores: np.ndarray | None,
    positive_scores: np.ndarray,
    config: MiningConfig,
    salt: np.ndarray,
) -> Decided:
    """The lists with the rule applied.

    Args:
        scores: (Q, C) of a cross-encoder; None: the teacher's decide.
        positive_scores: (Q,) of the lowest-scoring positives, by the model that decides.
        salt: (Q,) uint64, for uniform sampling.
    """
    deciding = candidates.scores if scores is None else scores
    left = by_rule(candidates, deciding, highest_scores(config.rule, positive_scores))
    uniform = config.sampling == "uniform"
    order = draw_order(left, salt) if uniform else score_order(left, deciding)
    return Decided(left, deciding, positive_scores, order, scores is not None)


def salts(records: Sequence[Record], seed: int, teacher: int) -> np.ndarray:
    """(Q,) uint64 that depend on seed, teacher and the record's id alone."""
    of_rows = (f"{seed}\0mining {teacher}\0{record.id}".encode() for record in records)
    return np.array([xxhash.xxh3_64_intdigest(one) for one in of_rows], dtype=np.uint64)

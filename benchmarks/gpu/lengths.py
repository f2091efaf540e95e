"""Lengths of texts as a step of NV-Embed has them, and micro-batches as they were cut before.

A made-up distribution, not the real data's: fitted so that the greedy cut below pads as it did
where padding was first counted (see `PADDING`). A row is a query, a positive and seven negatives.
"""

from dataclasses import dataclass

import numpy as np

from rayembed.data.plan.files import balanced

LONGEST = 512
"""Maximum tokens of a text in the recipe."""

TEXTS_OF_ROW = 9


@dataclass(frozen=True)
class Kind:
    """Rows of one kind of data set: lengths are log-normal, cut at `LONGEST`."""

    share: float
    """Of the rows."""
    query: float
    """Median tokens of a query, its instruction included."""
    document: float
    """Median tokens of a document."""
    query_spread: float
    """Standard deviation of a query's logarithm."""
    document_spread: float
    """Of a document's."""


RETRIEVAL = Kind(0.46, 30, 130, 0.4, 0.78)
OTHERS = Kind(0.54, 50, 38, 0.6, 0.78)
"""Classification, clustering, similarity: documents are labels, examples and sentences."""

BLEND = (RETRIEVAL, OTHERS)
ONLY_RETRIEVAL = (RETRIEVAL,)

PADDING = {
    (8, 4_096): (1.36, 1.36),
    (8, 16_384): (2.2, 2.2),
    (8, 65_536): (4.6, 4.6),
    (32, 4_096): (2.0, 2.0),
    (32, 16_384): (3.9, 4.1),
    (32, 65_536): (4.0, 4.3),
}
"""GPUs and token budget → least and most padded over real tokens that were counted for the greedy
cut, of 128 rows a step."""


def rows_of_lengths(kinds: tuple[Kind, ...], rows: int, seed: int) -> np.ndarray:
    """(rows, TEXTS_OF_ROW) int64 tokens of each text, the query first."""
    draw = np.random.default_rng(seed)
    shares = np.array([kind.share for kind in kinds])
    chosen = draw.choice(len(kinds), size=rows, p=shares / shares.sum())

    def of_rows(attribute: str) -> np.ndarray:
        return np.array([getattr(kind, attribute) for kind in kinds])[chosen][:, None]

    normal = draw.standard_normal((rows, TEXTS_OF_ROW))
    query = of_rows("query") * np.exp(of_rows("query_spread") * normal[:, :1])
    documents = of_rows("document") * np.exp(of_rows("document_spread") * normal[:, 1:])
    made = np.concatenate([query, documents], axis=1)
    return np.clip(np.rint(made), 4, LONGEST).astype(np.int64)


def greedy_cut(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Places of the texts in each micro-batch, cut only where the budget is reached.

    The longest texts come first; a text that would take the padded tokens above the budget begins
    the next micro-batch.
    """
    cuts: list[list[int]] = []
    for place in np.argsort(-lengths, kind="stable").tolist():
        if not cuts or (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] > budget:
            cuts.append([])
        cuts[-1].append(place)
    return cuts


def dealt_by_length(rows: np.ndarray, workers: int) -> list[np.ndarray]:
    """Rows of each worker in a batch that a plan has ordered by length."""
    return np.split(rows[balanced(rows.sum(1).tolist())], workers)


def dealt_by_place(rows: np.ndarray, workers: int) -> list[np.ndarray]:
    """Rows of each worker: slices of the batch."""
    return np.split(rows, workers)

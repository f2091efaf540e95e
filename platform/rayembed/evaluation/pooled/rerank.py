"""Score pairs of a query and its documents by a cross-encoder, on the workers of an evaluation."""

from dataclasses import dataclass

import numpy as np

from rayembed.config.run_evaluation import Reranker
from rayembed.data.mining.rescoring import load_cross_encoder


@dataclass(frozen=True)
class QueryPairs:
    """Request for a cross-encoder's scores of one query's documents.

    One query is one request, so that scores do not depend on the number of workers.
    """

    number: int
    """Number of the query in its task."""
    query: str
    documents: tuple[str, ...]
    reranker: Reranker
    weights: str
    """Fingerprint of the cross-encoder's weights."""


def rerank(call: QueryPairs, device: str) -> np.ndarray:
    """Return (N,) float32 scores of the query's documents, from 0 to 1.

    Raises:
        AssetError: the model is no cross-encoder.
    """
    score = load_cross_encoder(call.reranker, call.weights, device)
    return score([(call.query, document) for document in call.documents])

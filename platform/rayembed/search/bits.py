"""Search by different bits (Hamming distance) in part of a corpus, by FAISS's `IndexBinaryFlat`.

Distances are whole numbers up to D, so that many documents tie. FAISS leaves open which of them it
gives; here all that tie for a query's last place come, and whoever joins the parts of a corpus
decides by its own rule, whatever the parts are.

Q queries, n documents of the part, B bytes of a vector, D embedding width, R entries.
"""

from typing import NamedTuple

import numpy as np
import torch

from rayembed.search.faiss_library import require_faiss


class Nearest(NamedTuple):
    """Documents near the queries, one entry each, by query and rising distance."""

    row: np.ndarray
    """(R,) int64 rows of the queries."""
    place: np.ndarray
    """(R,) int64 places of documents."""
    distance: np.ndarray
    """(R,) int64 different bits."""


def nearest_bits(queries: np.ndarray, documents: np.ndarray, k: int) -> Nearest:
    """The k documents with the fewest different bits of each query, and all that tie with the last.

    Args:
        queries: (Q, B) uint8 packed bits.
        documents: (n, B) uint8 packed bits.
        k: at most all n come.
    """
    faiss = require_faiss("searches in bits")
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexBinaryFlat(8 * documents.shape[1])
    index.add(np.ascontiguousarray(documents))
    k = min(k, len(documents))
    reach, left = min(2 * k, len(documents)), np.arange(len(queries))
    found: list[Nearest] = []
    while len(left):
        distances, places = index.search(np.ascontiguousarray(queries[left]), reach)
        limit = distances[:, k - 1]
        whole = (distances[:, -1] > limit) | (reach == len(documents))
        at, column = np.nonzero((distances <= limit[:, None]) & whole[:, None])
        found.append(Nearest(left[at], places[at, column], distances[at, column].astype(np.int64)))
        left, reach = left[~whole], min(2 * reach, len(documents))
    if not found:
        return Nearest(*(np.empty(0, np.int64) for _ in Nearest._fields))
    return Nearest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def different_bits(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(R,) int64 different bits of (R, B) and (R, B) packed vectors, row by row."""
    found: np.ndarray = np.bitwise_count(first ^ second).sum(axis=1, dtype=np.int64)
    return found


def scores_of(distance: np.ndarray, width: int) -> np.ndarray:
    """(R,) float32 inner products of vectors of ±1/√D with so many different bits."""
    found: np.ndarray = (1 - 2 * distance / width).astype(np.float32)
    return found

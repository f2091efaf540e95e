"""Search part of a corpus whose vectors are stored as int8 codes or as bits.

Int8: inner products of codes, which float32 holds exactly (a unit vector's codes have squares that
sum to less than 2²⁴), by the kernel of float32 vectors. Binary: different bits, and if asked for a
second look at the best: products of queries in float32 with documents of another number type.

Q queries, n documents of the part, D embedding width, R entries.
"""

from typing import NamedTuple

import numpy as np
import torch

from rayembed.config.types import Precision, Rescoring, StoredVectors
from rayembed.machine.quantisation import int8_step, quantised, to_bits, to_int8
from rayembed.search.faiss_library import require_faiss

_AT_ONCE = 1 << 16
"""Number of entries rescored at a time: 256 MiB of 1,024 dimensions."""


class Nearest(NamedTuple):
    """Documents nearest to queries, as R entries sorted by query and rising distance."""

    row: np.ndarray
    """(R,) int64 rows of the queries."""
    place: np.ndarray
    """(R,) int64 indices of documents."""
    distance: np.ndarray
    """(R,) int64 number of different bits."""


def nearest_bits(queries: np.ndarray, documents: np.ndarray, k: int) -> Nearest:
    """Find for each query the k documents with the fewest different bits, and all documents that
    tie with the last.

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
    """(R,) int64 number of bits in which two arrays (R, B) of packed vectors differ, row by row."""
    found: np.ndarray = np.bitwise_count(first ^ second).sum(axis=1, dtype=np.int64)
    return found


def scores_of(distance: np.ndarray, width: int) -> np.ndarray:
    """(R,) float32 inner products of vectors with components ±1/√D, given the number of different
    bits.
    """
    found: np.ndarray = (1 - 2 * distance / width).astype(np.float32)
    return found


class Entries(NamedTuple):
    """Results of a search by bits: R pairs of a query and a document with their scores, in any
    order.
    """

    row: np.ndarray
    """(R,) int64 rows of the queries."""
    place: np.ndarray
    """(R,) int64 indices of documents."""
    score: np.ndarray
    """(R,) float32 products of the bits."""
    again: np.ndarray | None
    """(R,) float32 scores of the second pass, NaN for entries without one; None: there is none."""


def codes(vectors: np.ndarray) -> np.ndarray:
    """(N, D) int8 codes of unit vectors, as float32 so that their products are exact."""
    return to_int8(vectors).astype(np.float32)


def score_of_code_product(width: int) -> float:
    """Factor that converts an inner product of int8 codes to the inner product of their vectors."""
    return int8_step(width) ** 2


def best_by_bits(
    queries: np.ndarray,
    documents: np.ndarray,
    k: int,
    rescore: Rescoring | None,
    lowest: np.ndarray | None = None,
) -> Entries:
    """Find the k best documents of each query by their bits, including all that tie with
    the last.

    Args:
        queries: (Q, D) unit vectors, not yet quantised.
        documents: (n, D) unit vectors, not yet quantised.
        lowest: (Q,) float32: what scores below can be left out; None: nothing.
    """
    bits, width = to_bits(documents), documents.shape[1]
    found = nearest_bits(to_bits(queries), bits, max(k, rescore.candidates if rescore else 0))
    score = scores_of(found.distance, width)
    row, place = found.row, found.place
    if lowest is not None:
        kept = score >= lowest[row]
        row, place, score = row[kept], place[kept], score[kept]
    if rescore is None:
        return Entries(row, place, score, None)
    # Which of all documents are looked at again is decided where the parts are joined: here come
    # all that can be among them.
    again = np.full(len(row), np.nan, np.float32)
    looked = np.flatnonzero(score >= _limit(row, score, len(queries), rescore.candidates)[row])
    again[looked] = pair_products(queries, documents, row[looked], place[looked], rescore.precision)
    return Entries(row, place, score, again)


def pair_scores(
    queries: np.ndarray,
    documents: np.ndarray,
    row: np.ndarray,
    place: np.ndarray,
    stored: StoredVectors,
) -> np.ndarray:
    """(R,) float32 scores of given query-document pairs, equal to the scores of a search.

    Where there is a second look, it looks at all of them.

    Args:
        queries: (Q, D) unit vectors, not yet quantised.
        documents: (n, D) unit vectors, not yet quantised.
    """
    if stored.rescore is not None:
        return pair_products(queries, documents, row, place, stored.rescore.precision)
    if stored.precision == "binary":
        bits = different_bits(to_bits(queries)[row], to_bits(documents)[place])
        return scores_of(bits, documents.shape[1])
    # As `codes` has it: exact sums, and one factor.
    products = _products(to_int8(queries), to_int8(documents), row, place)
    found: np.ndarray = products * np.float32(score_of_code_product(documents.shape[1]))
    return found


def pair_products(
    queries: np.ndarray,
    documents: np.ndarray,
    row: np.ndarray,
    place: np.ndarray,
    precision: Precision,
) -> np.ndarray:
    """(R,) float32 inner products of float32 queries with documents in their stored precision."""
    used, at = np.unique(place, return_inverse=True)
    return _products(queries, quantised(documents[used], precision), row, at)


def _products(
    queries: np.ndarray, documents: np.ndarray, row: np.ndarray, place: np.ndarray
) -> np.ndarray:
    found = np.empty(len(row), np.float32)
    for start in range(0, len(row), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        left, right = queries[row[some]], documents[place[some]]
        found[some] = np.einsum("rd,rd->r", left, right, dtype=np.float32)
    return found


def _limit(row: np.ndarray, score: np.ndarray, num_queries: int, number: int) -> np.ndarray:
    """(Q,) score of each query's `number`-th best entry; -inf where it has fewer."""
    limits = np.full(num_queries, -np.inf, np.float32)
    order = np.lexsort((-score, row))
    first = np.searchsorted(row[order], np.arange(num_queries))
    rank = np.arange(len(row)) - first[row[order]]
    last = order[rank == number - 1]
    limits[row[last]] = score[last]
    return limits

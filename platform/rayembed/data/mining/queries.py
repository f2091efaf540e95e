"""Distinct queries of a Parquet part, with the positives that must not become their negatives, and
the rows' own hard negatives.

Rows with the same query form one query with the positives of all, so that dependent results are
computed once instead of for each row. The negatives that rows bring are the only candidates where
`pool` is `given`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.data.hashes import label_hash, text_hash
from rayembed.data.mining.corpus import CorpusIndex
from rayembed.data.records import Record
from rayembed.data.vectors.embed import Vectors, given_texts
from rayembed.data.words import normalised_hash
from rayembed.search.order import NO_RESULT


@dataclass(frozen=True)
class Queries:
    """Arrays about the queries of a Parquet part: N rows with Q distinct queries, P positives and G
    hard negatives given by the rows.
    """

    query_hash: np.ndarray
    """(N,) int64 hash of the query's text."""
    asked_hash: np.ndarray
    """(N,) int64 `normalised_hash` of the query: rows that ask the same share their positives."""
    label_hash: np.ndarray
    """(N,) int64 class hash, `NO_HASH` without a class."""
    of_row: np.ndarray
    """(N,) int64 query number of each row."""
    first_row: np.ndarray
    """(Q,) int64, sorted: first row with the query."""
    positive_of: np.ndarray
    """(P,) int64, sorted: query number of each positive; every query occurs."""
    positive: np.ndarray
    """(P,) int64 document ids, distinct and sorted within a query."""
    own_of: np.ndarray
    """(O,) int64, sorted: row of each row's own positives, in the rows' order."""
    own_positive: np.ndarray
    """(O,) int64 indices of these among the P."""
    given_of: np.ndarray
    """(G,) int64, sorted: row of each own negative."""
    given_hash: np.ndarray
    """(G,) int64 hash of the negative's text."""


def queries_of(records: Sequence[Record], corpus: CorpusIndex) -> Queries:
    """Collect the distinct queries of records and the positives of each; the records must be rows
    of the corpus.

    Queries that differ by case and white space are several, with the positives of all of them.

    A query with too many positives in the corpus is treated as a separate query in each of its
    rows, with that row's positives.
    """
    query_hash = _array([text_hash(record.query) for record in records])
    asked_hash = _array([normalised_hash(record.query) for record in records])
    shared = corpus.shares(asked_hash)
    asked = np.arange(len(records))
    _, places, same = np.unique(query_hash[shared], return_index=True, return_inverse=True)
    asked[shared] = np.flatnonzero(shared)[places][same]
    first_row, of_row = np.unique(asked, return_inverse=True)
    alone = np.flatnonzero(~shared[first_row])
    own_of, own = _flat(
        [[text_hash(t) for t in records[row].positives] for row in first_row[alone]]
    )
    several = np.flatnonzero(shared[first_row])
    shared_of, shared_positive = corpus.positives_of(asked_hash[first_row[several]])
    of = np.concatenate([alone[own_of], several[shared_of]])
    positive_of, positive = np.unique(
        np.stack([of, np.concatenate([corpus.ids_of(own), shared_positive])]), axis=1
    )
    given_of, given = _flat([[text_hash(n.text) for n in r.negatives] for r in records])
    rows_of, texts = _flat([[text_hash(t) for t in record.positives] for record in records])
    own_ids = corpus.ids_of(texts)
    width = len(corpus.text_hash)
    return Queries(
        query_hash=query_hash,
        asked_hash=asked_hash,
        label_hash=_array([label_hash(record.label) for record in records]),
        of_row=of_row,
        first_row=first_row,
        positive_of=positive_of,
        positive=positive,
        own_of=rows_of,
        own_positive=np.searchsorted(
            positive_of * width + positive, of_row[rows_of] * width + own_ids
        ),
        given_of=given_of,
        given_hash=given,
    )


def positive_texts(
    records: Sequence[Record], queries: Queries, corpus: CorpusIndex
) -> list[tuple[str, ...]]:
    """Return the texts of each query's positives, reading from the corpus only those that the rows
    themselves lack.
    """
    own = [dict.fromkeys(records[row].positives) for row in queries.first_row]
    count = np.bincount(queries.positive_of, minlength=len(own))
    further = (
        count[queries.positive_of] > np.array([len(some) for some in own])[queries.positive_of]
    )
    of, documents = queries.positive_of[further], queries.positive[further]
    texts = corpus.texts_of(set(documents.tolist()))
    for query, document in zip(of.tolist(), documents.tolist(), strict=True):
        own[query][texts[document]] = None
    return [tuple(some) for some in own]


def positive_scores(
    queries: Queries, query_vectors: np.ndarray, corpus: CorpusIndex, vectors: Vectors
) -> np.ndarray:
    """(P,) float32 scores that a teacher gives each query with each of its positives.

    Args:
        query_vectors: (N, D) of unit length.
    """
    order = np.argsort(queries.positive, kind="stable")
    documents = queries.positive[order]
    row = queries.first_row[queries.positive_of[order]]
    found = [np.empty(0, dtype=np.float32)]
    for some, of_documents in corpus.vectors_of(vectors, documents):
        for start in range(0, len(of_documents), _PAIRS_AT_A_TIME):
            few = slice(start, start + _PAIRS_AT_A_TIME)
            of_queries = query_vectors[row[some][few]].astype(np.float32)
            found.append((of_queries * of_documents[few].astype(np.float32)).sum(1))
    scores = np.empty(len(order), dtype=np.float32)
    scores[order] = np.concatenate(found)
    return scores


def of_own_positives(queries: Queries, scores: np.ndarray) -> list[list[float]]:
    """Return for each row the scores of its own positives, in their order.

    Args:
        scores: (P,) of all positives.
    """
    edges = np.flatnonzero(np.diff(queries.own_of))
    return [one.tolist() for one in np.split(scores[queries.own_positive], edges + 1)]


def lowest_of_queries(query: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Lowest score of each query; `query` is the sorted query number of each score, without
    gaps.
    """
    return np.asarray(np.minimum.reduceat(scores, np.flatnonzero(np.diff(query, prepend=-1))))


_PAIRS_AT_A_TIME = 8192


def _flat(hashes: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    of = np.repeat(np.arange(len(hashes)), _array([len(some) for some in hashes]))
    return of, _array([one for some in hashes for one in some])


def _array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def given_lists(
    records: Sequence[Record], queries: np.ndarray, given: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ids of each row's own hard negatives, best first, in the format of
    `search.exact.top_k`.

    Args:
        queries: (Q, D) of unit length.
        given: (G, D) in the order of `given_texts`, whose places are the ids.
    """
    place_of = {text: place for place, text in enumerate(given_texts(records))}
    own = [list(dict.fromkeys(place_of[n.text] for n in record.negatives)) for record in records]
    row = np.repeat(np.arange(len(own)), np.array([len(places) for places in own], dtype=np.int64))
    column = np.array([c for places in own for c in range(len(places))], dtype=np.int64)
    document = np.array([place for places in own for place in places], dtype=np.int64)
    shape = (len(own), max(map(len, own), default=0))
    scores = np.full(shape, -np.inf, dtype=np.float32)
    ids = np.full(shape, NO_RESULT, dtype=np.int64)
    ids[row, column] = document
    for start in range(0, len(row), _PAIRS_AT_A_TIME):
        some = slice(start, start + _PAIRS_AT_A_TIME)
        of_queries = queries[row[some]].astype(np.float32)
        found = (of_queries * given[document[some]].astype(np.float32)).sum(1)
        scores[row[some], column[some]] = found
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)

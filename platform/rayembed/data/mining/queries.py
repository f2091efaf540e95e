"""What must be known of a part's queries to refuse what can be no negative of theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.data.hashes import label_hash, text_hash
from rayembed.data.mining.corpus import Corpus
from rayembed.data.records import Record
from rayembed.data.vectors.embed import Vectors


@dataclass(frozen=True)
class Queries:
    """Q rows of a part, P positives of theirs, G negatives that they bring."""

    query_hash: np.ndarray
    """(Q,) int64."""
    label_hash: np.ndarray
    """(Q,) int64, `NO_HASH` where there is no class."""
    positive_of: np.ndarray
    """(P,) int64, sorted: the row of each positive. Rows that ask the same share theirs."""
    positive: np.ndarray
    """(P,) int64 ids of documents, distinct within a row."""
    given_of: np.ndarray
    """(G,) int64, sorted: the row of each given negative."""
    given_hash: np.ndarray
    """(G,) int64 of its text."""


def queries_of(records: Sequence[Record], corpus: Corpus) -> Queries:
    """What is known of the records' queries; the records are rows of the corpus."""
    query_hash = _array([text_hash(record.query) for record in records])
    own_of, own = _flat([[text_hash(t) for t in record.positives] for record in records])
    given_of, given = _flat([[text_hash(n.text) for n in r.negatives] for r in records])
    shared_of, shared = corpus.positives_of(query_hash)
    pairs = np.stack(
        [np.concatenate([own_of, shared_of]), np.concatenate([corpus.ids_of(own), shared])]
    )
    positive_of, positive = np.unique(pairs, axis=1)
    return Queries(
        query_hash=query_hash,
        label_hash=_array([label_hash(record.label) for record in records]),
        positive_of=positive_of,
        positive=positive,
        given_of=given_of,
        given_hash=given,
    )


def positive_texts(
    records: Sequence[Record], queries: Queries, corpus: Corpus
) -> list[tuple[str, ...]]:
    """The texts of each row's positives, and of those of other rows that ask the same."""
    of, documents = corpus.positives_of(queries.query_hash)
    texts = corpus.texts_of(set(documents.tolist()))
    found = [dict.fromkeys(record.positives) for record in records]
    for row, document in zip(of.tolist(), documents.tolist(), strict=True):
        found[row][texts[document]] = None
    return [tuple(of_row) for of_row in found]


def lowest_scores(
    queries: Queries, query_vectors: np.ndarray, corpus: Corpus, vectors: Vectors
) -> np.ndarray:
    """(Q,) float32: the teacher's score of each query with its lowest-scoring positive.

    Args:
        query_vectors: (Q, D) of unit length.
    """
    documents, place = np.unique(queries.positive, return_inverse=True)
    found = corpus.vectors_of(vectors, documents)
    scores = np.empty(len(place), dtype=np.float32)
    for start in range(0, len(place), _PAIRS_AT_A_TIME):
        some = slice(start, start + _PAIRS_AT_A_TIME)
        of_queries = query_vectors[queries.positive_of[some]].astype(np.float32)
        scores[some] = (of_queries * found[place[some]].astype(np.float32)).sum(1)
    return lowest_of_rows(queries.positive_of, scores)


def lowest_of_rows(row: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The lowest of the scores of each row; `row` is sorted and leaves none out."""
    return np.asarray(np.minimum.reduceat(scores, np.flatnonzero(np.diff(row, prepend=-1))))


_PAIRS_AT_A_TIME = 8192


def _flat(hashes: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    of = np.repeat(np.arange(len(hashes)), _array([len(some) for some in hashes]))
    return of, _array([one for some in hashes for one in some])


def _array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)

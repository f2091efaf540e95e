"""Positive-aware hard negatives (TopK-PercPos, arXiv 2407.15831, section 4), as plain functions.

A candidate is a document that the teacher scores high for the query. It is kept as a negative
when it scores at most `max_relative_score` of what the positive scores, since better ones are
likely positives that nobody marked. Q queries, C candidates of each, N documents of the corpus.
Texts and classes are compared by 64-bit hashes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayembed.data.hashes import NO_HASH, label_hash, text_hash
from rayembed.data.records import Negative, Record
from rayembed.search.exact import top_k
from rayembed.search.order import NO_RESULT

RULE = "top_k_perc_pos"
"""Rule of mined negatives in their provenance."""


@dataclass(frozen=True)
class MiningQuery:
    """What must be known of a query beside its vector."""

    query_hash: int
    positive_hashes: frozenset[int]
    label_hash: int = NO_HASH
    given_hashes: frozenset[int] = frozenset()
    """Negatives that it has already; they are not taken again."""


@dataclass(frozen=True)
class Corpus:
    """What must be known of the documents beside their vectors."""

    text_hash: np.ndarray
    """(N,) int64."""
    label_hashes: Sequence[frozenset[int]] | None
    """(N) classes of each document; None: there are no classes."""


@dataclass(frozen=True)
class Found:
    """A mined negative."""

    document: int
    rank: int
    """Place in the teacher's list of all documents, from 0."""
    score: float


def query_of(record: Record) -> MiningQuery:
    """What mining must know of the record."""
    return MiningQuery(
        text_hash(record.query),
        frozenset(text_hash(text) for text in record.positives),
        label_hash(record.label),
        frozenset(text_hash(negative.text) for negative in record.negatives),
    )


def highest_score(positive_score: float, max_relative_score: float) -> float:
    """The score that a negative may have at most.

    `max_relative_score` times the positive's score where that is positive. A negative one is
    lowered by the same share of its size (-0.2 → -0.21 at 0.95), so that a negative scores below
    the positive always; multiplied it would rise above it.
    """
    return positive_score - (1.0 - max_relative_score) * abs(positive_score)


def mine(
    queries: np.ndarray,
    positive_scores: np.ndarray,
    known: Sequence[MiningQuery],
    shards: Iterable[np.ndarray],
    corpus: Corpus,
    *,
    num_negatives: int,
    max_relative_score: float,
    candidates: int,
    device: str = "cpu",
) -> list[list[Found]]:
    """The hard negatives of each query, best first; fewer where the rule leaves fewer.

    Never taken are texts that are the query or one of its positives or given negatives, documents
    of the query's class, and a text twice.

    Args:
        queries: (Q, D) of unit length.
        positive_scores: (Q,) the teacher's score of each query with its positive.
        shards: the corpus' vectors, in the order of `corpus`.
        candidates: depth of the search.
        device: where to search, as in `top_k`.
    """
    scores, ids = top_k(queries, shards, candidates, device)
    limits = [highest_score(float(score), max_relative_score) for score in positive_scores]
    return [
        _choose(scores[i], ids[i], limits[i], known[i], corpus)[:num_negatives]
        for i in range(len(known))
    ]


def _choose(
    scores: np.ndarray, ids: np.ndarray, limit: float, query: MiningQuery, corpus: Corpus
) -> list[Found]:
    taken = {query.query_hash} | query.positive_hashes | query.given_hashes
    chosen = []
    for rank, (score, document) in enumerate(zip(scores.tolist(), ids.tolist(), strict=True)):
        if document == NO_RESULT:
            break
        text = int(corpus.text_hash[document])
        if score > limit or text in taken:
            continue
        classes = corpus.label_hashes[document] if corpus.label_hashes is not None else ()
        if query.label_hash != NO_HASH and query.label_hash in classes:
            continue
        taken.add(text)
        chosen.append(Found(document, rank, score))
    return chosen


def with_negatives(
    record: Record,
    found: Sequence[tuple[str, Found]],
    positive_score: float,
    teacher: str,
    num_negatives: int,
) -> Record:
    """The record with its given negatives first, filled up to `num_negatives` with mined ones.

    Args:
        found: text and origin of each mined negative.
        teacher: fingerprint of the teacher's weights.
    """
    mined = [Negative(text, f.rank, f.score, RULE, teacher) for text, f in found]
    room = max(num_negatives - len(record.negatives), 0)
    return replace(
        record,
        negatives=(*record.negatives, *mined[:room]),
        positive_score=positive_score,
    )

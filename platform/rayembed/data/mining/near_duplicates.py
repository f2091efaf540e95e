"""Near-duplicate texts by shared word trigrams."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rayembed.data.words import words


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    """Word trigrams of a text, without case and punctuation.

    A text with fewer words gives one n-gram of all its words; a text without words gives itself.
    """
    found = words(text)
    if len(found) < 3:
        return frozenset([tuple(found)])
    return frozenset(zip(found, found[1:], found[2:], strict=False))


def is_near_duplicate(
    text: str, positives: Sequence[frozenset[tuple[str, ...]]], similarity: float
) -> bool:
    """Whether the Jaccard similarity of trigrams with any positive reaches `similarity`."""
    own = trigrams(text)
    for other in positives:
        common = len(own & other)
        # A quotient is rounded once, as the setting is: 7 of 10 reach 0.7, which 0.7 · 10 exceeds.
        if common / (len(own) + len(other) - common) >= similarity:
            return True
    return False


def copies_among(
    asked: Mapping[int, Collection[int]],
    texts: Mapping[int, str],
    query_of: np.ndarray,
    positives: Sequence[Sequence[str]],
    similarity: float,
) -> dict[int, set[int]]:
    """Documents among the requested ones (row → ids) that nearly duplicate a positive of the row.

    Args:
        texts: of the documents by id.
        query_of: the query of each row; what rows of one query ask about is compared once.
        positives: texts of each query.
    """
    by_query: dict[int, set[int]] = {}
    for row, documents in asked.items():
        by_query.setdefault(int(query_of[row]), set()).update(documents)
    copies = {}
    for query, wanted in by_query.items():
        own = [trigrams(text) for text in positives[query]]
        copies[query] = {d for d in wanted if is_near_duplicate(texts[d], own, similarity)}
    return {row: copies[int(query_of[row])].intersection(ids) for row, ids in asked.items()}

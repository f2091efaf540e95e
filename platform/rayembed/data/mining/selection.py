"""Selection of negatives from open candidates: teachers take turns, copies of positives are
skipped.

Whether a candidate is a copy of a positive or of the query shows only in its text, and reading
texts is the main cost. So queries first select without this check, the texts of the selected
documents are read, and queries that selected a copy select again until none did. The result equals
that of checking all candidates. Copies are told by shared word trigrams.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.data.words import same_text_form, words

Copies = Callable[[Mapping[int, Collection[int]]], dict[int, set[int]]]
"""Finds, among documents that queries may take (row → ids), near-copies of their positives."""


@dataclass(frozen=True)
class SelectedNegative:
    """A selected negative: its document, the teacher that proposed it and its rank in that list."""

    document: int
    teacher: int
    place: int


def select_negatives(
    lists: Sequence[Sequence[Sequence[int]]], wanted: Sequence[int], copies: Copies | None
) -> tuple[list[list[SelectedNegative]], int]:
    """Negatives of each row in the order of selection, and the number of copies of positives met.

    Args:
        lists: for each row and teacher the documents to take, the first one first.
        wanted: negatives of each row; fewer where its lists have fewer.
        copies: None: nothing is checked.
    """
    chosen = [round_robin(of_row, count) for of_row, count in zip(lists, wanted, strict=True)]
    if copies is None:
        return chosen, 0
    checked: list[set[int]] = [set() for _ in lists]
    refused: list[set[int]] = [set() for _ in lists]
    pending = [row for row, found in enumerate(chosen) if found]
    # Rows that choose again look further ahead each time, so that few rounds do for a long run of
    # copies.
    ahead = 1
    while pending:
        asked = {}
        for row in pending:
            reach = round_robin(lists[row], wanted[row] * ahead, refused[row])
            asked[row] = {one.document for one in reach} - checked[row]
        found = copies(asked)
        for row, documents in asked.items():
            checked[row] |= documents
            refused[row] |= found.get(row, set())
        again = []
        for row in pending:
            chosen[row] = round_robin(lists[row], wanted[row], refused[row])
            if any(one.document not in checked[row] for one in chosen[row]):
                again.append(row)
        pending, ahead = again, 2 * ahead
    return chosen, sum(map(len, refused))


def round_robin(
    lists: Sequence[Sequence[int]], count: int, refused: Collection[int] = ()
) -> list[SelectedNegative]:
    """Up to `count` distinct, not refused documents, one from each list in turn."""
    taken: dict[int, SelectedNegative] = {}
    places = [0] * len(lists)
    left = [teacher for teacher, documents in enumerate(lists) if documents]
    while left and len(taken) < count:
        for teacher in tuple(left):
            documents = lists[teacher]
            place = places[teacher]
            while place < len(documents) and (
                documents[place] in taken or documents[place] in refused
            ):
                place += 1
            places[teacher] = place + 1
            if place == len(documents):
                left.remove(teacher)
                continue
            taken[documents[place]] = SelectedNegative(documents[place], teacher, place)
            if len(taken) == count:
                break
    return list(taken.values())


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
    queries: Sequence[str],
    positives: Sequence[Sequence[str]],
    similarity: float | None,
) -> dict[int, set[int]]:
    """Documents among the requested ones (row → ids) that are the query or a positive of the row,
    whatever their case and white space, or nearly duplicate a positive.

    Args:
        texts: of the documents by id.
        query_of: the query of each row; what rows of one query ask about is compared once.
        queries: text of each query.
        positives: texts of each query.
        similarity: from which on a document is a near-duplicate; None: none is.
    """
    by_query: dict[int, set[int]] = {}
    for row, documents in asked.items():
        by_query.setdefault(int(query_of[row]), set()).update(documents)
    copies = {}
    for query, wanted in by_query.items():
        equal = set(map(same_text_form, (queries[query], *positives[query])))
        copies[query] = {d for d in wanted if same_text_form(texts[d]) in equal}
        if similarity is not None:
            near = [trigrams(text) for text in positives[query]]
            left = wanted - copies[query]
            copies[query] |= {d for d in left if is_near_duplicate(texts[d], near, similarity)}
    return {row: copies[int(query_of[row])].intersection(ids) for row, ids in asked.items()}

"""Candidate lists of a teacher for each query: refuse unsuitable candidates, and order the others
for selection.

Q queries, C places of a list.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from rayembed.config.mining import MiningConfig
from rayembed.data.hashes import NO_HASH, mixed
from rayembed.data.mining.corpus import CorpusIndex, among, pair_hash
from rayembed.data.mining.queries import Queries
from rayembed.data.records import Record
from rayembed.data.words import same_text_form, words
from rayembed.search.order import NO_RESULT

OPEN, EMPTY, SKIPPED, QUERY, POSITIVE, GIVEN, CLASS, NEAR_DUPLICATE, RULE = range(9)

REASONS = {
    SKIPPED: "skipped rank",
    QUERY: "the query itself",
    POSITIVE: "a positive",
    GIVEN: "given already",
    CLASS: "of the query's class",
    NEAR_DUPLICATE: "near-duplicate of a positive",
    RULE: "by the rule",
}
"""Names of refusal reasons in the audit. A candidate counts under its first reason."""


@dataclass(frozen=True)
class MinedCandidates:
    """Candidates of one teacher for each query, best first, with the state of each: open or
    refused.
    """

    scores: np.ndarray
    """(Q, C) float32 scores, `-inf` for empty places."""
    ids: np.ndarray
    """(Q, C) int64 document ids, `NO_RESULT` for empty places."""
    hashes: np.ndarray
    """(Q, C) int64 text hashes, `NO_HASH` for empty places."""
    status: np.ndarray
    """(Q, C) uint8 state: `OPEN`, `EMPTY` or the reason for refusal."""

    @property
    def open(self) -> np.ndarray:
        """(Q, C) bool mask of candidates not refused so far."""
        return np.asarray(self.status == OPEN)


def candidates_of(scores: np.ndarray, ids: np.ndarray, text_hash: np.ndarray) -> MinedCandidates:
    """Make candidate lists from the scores and ids of a search.

    Args:
        text_hash: int64 by id.
    """
    there = ids != NO_RESULT
    hashes = np.full(ids.shape, NO_HASH, dtype=np.int64)
    hashes[there] = text_hash[ids[there]]
    status = np.where(there, OPEN, EMPTY).astype(np.uint8)
    return MinedCandidates(scores, ids, hashes, status)


def without_ineligible(
    candidates: MinedCandidates, queries: Queries, corpus: CorpusIndex, *, skip: int, given: bool
) -> MinedCandidates:
    """Refuse candidates that cannot be negatives at any score, such as positives and the query
    itself.

    Refused are the first ranks, the query itself, its positives (including those of other rows with
    the same query), and documents of its class.

    Args:
        given: also the negatives that the row brings.
    """
    hashes = candidates.hashes
    positives = corpus.text_hash[queries.positive]
    labelled = np.flatnonzero(queries.label_hash != NO_HASH)
    same_class = np.zeros(hashes.shape, dtype=bool)
    same_class[labelled] = corpus.of_class(hashes[labelled], queries.label_hash[labelled, None])
    against = [
        (SKIPPED, np.broadcast_to(np.arange(hashes.shape[1]) < skip, hashes.shape)),
        (QUERY, hashes == queries.query_hash[:, None]),
        (POSITIVE, _of_rows(hashes, queries.of_row, queries.positive_of, positives)),
        (CLASS, same_class),
    ]
    if given:
        rows = np.arange(len(hashes))
        given_ones = _of_rows(hashes, rows, queries.given_of, queries.given_hash)
        against.insert(3, (GIVEN, given_ones))
    return refused(candidates, *against)


def given_positives(queries: Queries, corpus: CorpusIndex) -> np.ndarray:
    """(G,) bool mask of the rows' own hard negatives that are in fact positives of their query."""
    asker = queries.of_row[queries.given_of]
    positives = np.sort(pair_hash(corpus.text_hash[queries.positive], queries.positive_of))
    return among(positives, pair_hash(queries.given_hash, asker))


def draw_order(candidates: MinedCandidates, salt: np.ndarray) -> np.ndarray:
    """(Q, C) columns in random order, determined by salt and texts only; open candidates
    first.

    Args:
        salt: (Q,) uint64.
    """
    drawn = mixed(candidates.hashes.view(np.uint64) ^ salt[:, None])
    return np.lexsort((drawn, ~candidates.open))


def score_order(candidates: MinedCandidates, scores: np.ndarray) -> np.ndarray:
    """(Q, C) columns by falling score, ties by rank; open candidates first."""
    return np.lexsort((-scores, ~candidates.open))


def stratified_order(
    candidates: MinedCandidates, scores: np.ndarray, salt: np.ndarray, strata: int
) -> np.ndarray:
    """(Q, C) columns in the order of selection: a random candidate of each score stratum, highest
    first, then a second of each, and so on.

    Args:
        salt: (Q,) uint64.
        strata: equal shares of a query's open candidates by falling score.
    """
    ranked = score_order(candidates, scores)
    count = candidates.open.sum(1)[:, None]
    place = np.arange(ranked.shape[1])[None, :]
    by_rank = np.minimum(place * strata // np.maximum(count, 1), strata)
    stratum = np.empty_like(by_rank)
    np.put_along_axis(stratum, ranked, by_rank, 1)
    drawn = mixed(candidates.hashes.view(np.uint64) ^ salt[:, None])
    shuffled = np.lexsort((drawn, stratum, ~candidates.open))
    # The how-manieth of its stratum: its place after those before that are of other strata.
    of_place = np.take_along_axis(stratum, shuffled, 1)
    starts = np.concatenate([np.ones_like(of_place[:, :1]), np.diff(of_place, axis=1)], axis=1) != 0
    turn = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    turns = np.empty_like(turn)
    np.put_along_axis(turns, shuffled, turn, 1)
    return np.lexsort((stratum, turns, ~candidates.open))


def refused(candidates: MinedCandidates, *against: tuple[int, np.ndarray]) -> MinedCandidates:
    """Mark open candidates as refused where a reason's (Q, C) bool mask is set; the first reason
    counts.
    """
    status = candidates.status.copy()
    for reason, mask in against:
        status[(status == OPEN) & mask] = reason
    return replace(candidates, status=status)


def _of_rows(
    hashes: np.ndarray, asker: np.ndarray, of: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """(Q, C) bool mask of hashes that occur in the list of hashes of the same query; `of` gives the
    query of each listed hash.
    """
    return among(np.sort(pair_hash(wanted, of)), pair_hash(hashes, asker[:, None]))


@dataclass(frozen=True)
class RankedCandidates:
    """One teacher's candidate lists after the rule has refused likely positives. Q queries, C
    candidates.
    """

    candidates: MinedCandidates
    scores: np.ndarray
    """(Q, C) float32 scores that the rule used: the teacher's or the cross-encoder's."""
    positive_scores: np.ndarray
    """(Q,) float32 score of the lowest-scoring positive, by the same model."""
    order: np.ndarray
    """(Q, C) columns in the order of selection; open candidates first."""
    rescored: bool
    """Whether `scores` come from the cross-encoder."""

    def documents(self) -> list[list[int]]:
        """Eligible document ids of each row, in the order of selection."""
        ids = np.take_along_axis(self.candidates.ids, self.order, 1)
        count = self.candidates.open.sum(1)
        return [of_row[:n].tolist() for of_row, n in zip(ids, count, strict=True)]


def rank_candidates(
    candidates: MinedCandidates,
    scores: np.ndarray | None,
    positive_scores: np.ndarray,
    config: MiningConfig,
    salt: np.ndarray,
) -> RankedCandidates:
    """Refuse candidates that score too high by the mining rule, and order the others for
    selection.

    Args:
        scores: (Q, C) of a cross-encoder; None: the teacher's decide.
        positive_scores: (Q,) of the lowest-scoring positives, by the model that decides.
        salt: (Q,) uint64, for draws.
    """
    deciding = candidates.scores if scores is None else scores
    highest = config.rule.highest_scores(positive_scores)
    left = refused(candidates, (RULE, deciding > highest[:, None]))
    if config.sampling == "uniform":
        order = draw_order(left, salt)
    elif config.sampling == "stratified":
        # Teachers take turns, each over its own list.
        strata = -(-config.num_negatives // (1 + len(config.further_teachers)))
        order = stratified_order(left, deciding, salt, strata)
    else:
        order = score_order(left, deciding)
    return RankedCandidates(left, deciding, positive_scores, order, scores is not None)


def salts(records: Sequence[Record], seed: int, teacher: int) -> np.ndarray:
    """(Q,) uint64 salts for random orders, from seed, teacher and record id only."""
    of_rows = (f"{seed}\0mining {teacher}\0{record.id}".encode() for record in records)
    return np.array([xxhash.xxh3_64_intdigest(one) for one in of_rows], dtype=np.uint64)


Copies = Callable[[Mapping[int, Collection[int]]], dict[int, set[int]]]
"""Finds near-copies of positives among the documents requested for each row (row → ids)."""


@dataclass(frozen=True)
class SelectedNegative:
    """A selected negative: its document, the teacher that proposed it, and its rank in that
    teacher's list.
    """

    document: int
    teacher: int
    place: int


def select_negatives(
    lists: Sequence[Sequence[Sequence[int]]], wanted: Sequence[int], copies: Copies | None
) -> tuple[list[list[SelectedNegative]], int]:
    """Select the negatives of each row, and count the candidates skipped as copies of
    positives.

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
    """Take up to `count` distinct documents that are not refused, one from each list in turn."""
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
    """Find among the documents listed for each row (row → ids) those equal or similar to the row's
    query or a positive.

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

"""The mining task, which selects the hard negatives of all rows of a mining unit.

What a process holds of a unit: vectors of its queries, 12 bytes for each candidate of each query,
and beyond that the rows and texts of some parts at a time (`found.parts_of_texts`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from rayembed.config.mining import CrossEncoder, MiningConfig
from rayembed.data.engine.parts import Part, read_records, write_part
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import text_hash
from rayembed.data.mining.candidate_search import CorpusSearch, MineUnit, parts_of_texts
from rayembed.data.mining.candidates import (
    RULE,
    MinedCandidates,
    RankedCandidates,
    SelectedNegative,
    candidates_of,
    copies_among,
    given_positives,
    rank_candidates,
    salts,
    select_negatives,
    without_ineligible,
)
from rayembed.data.mining.corpus import CorpusIndex, open_corpus
from rayembed.data.mining.counts import (
    EXAMPLES,
    add_up_blocks,
    count_candidates,
    example,
    histogram,
    refused_counts,
    rows_to_show,
    write_examples,
)
from rayembed.data.mining.queries import (
    Queries,
    given_lists,
    lowest_of_queries,
    of_own_positives,
    positive_scores,
    positive_texts,
    queries_of,
)
from rayembed.data.mining.rescoring import Scorer, load_cross_encoder, rescore
from rayembed.data.plan.teacher_scores import scores_of_positives
from rayembed.data.records import Negative, Record
from rayembed.data.vectors.embed import Vectors, given_texts
from rayembed.data.words import same_text_form
from rayembed.display.progress import piece, pieces
from rayembed.search.exact import TopK

_REFUSED_SHOWN = 3
"""Best refused candidates shown in an example."""

ReadTexts = Callable[[Collection[int]], Mapping[int, str]]


@dataclass(frozen=True)
class _MinedPart:
    """State of mining a part: its rows, candidates and scores before negatives are selected."""

    records: list[Record]
    queries: Queries
    corpus: CorpusIndex
    kept: list[tuple[Negative, ...]]
    """Own negatives that each row keeps."""
    dropped: int
    """Own negatives that are positives of the same query in any row."""
    lists: list[MinedCandidates]
    """Candidates by teacher, without certain non-negatives."""
    own: list[list[float]]
    """Scores of each row's positives by the first teacher."""
    crossed: list[list[float]] | None
    """Scores of the same pairs by the cross-encoder, if mining uses one."""
    decided: list[RankedCandidates]
    positives: list[tuple[str, ...]]
    """Texts of each query's positives."""


@dataclass(frozen=True)
class MineParts:
    """Task: select hard negatives for the rows of a mining unit's Parquet parts, and write these
    rows as new parts.
    """

    folder: str
    """Folder of the output parts."""
    search: CorpusSearch
    """Candidate search; its folder also gets each unit's examples, which `counts.add_up_mining`
    reads."""
    teachers: tuple[Vectors, ...]
    """Vectors of the teachers, in the order in which these take turns."""
    config: MiningConfig
    cross_encoder: str = ""
    """Fingerprint of the cross-encoder's weights, if `config` names one."""
    load_cross_encoder: Callable[[CrossEncoder, str, str], Scorer] = load_cross_encoder

    def __call__(self, item: MineUnit, device: str = "cpu") -> Result:
        """Write the mining unit's new Parquet parts, and return their names with the statistics
        that `counts.add_up_mining` sums.
        """
        found: list[list[TopK | None]] = [[None] * len(item.parts) for _ in self.teachers]
        # A cross-encoder takes most of the time where there is one, else the search.
        searched = 0.9 if self.config.rescoring is None else 0.1
        if self.config.pool == "corpus":
            with piece(0.0, searched):
                found = [
                    [*self.search.search_unit(item, vectors, device)]
                    for vectors in pieces(self.teachers)
                ]
        by_part = list(zip(item.parts, zip(*found, strict=True), strict=True))
        results = []
        shown: dict[int, dict[str, Any]] = {}
        together = parts_of_texts(len(by_part))
        with piece(searched, 1.0):
            for first in pieces(range(0, len(by_part), together)):
                parts = [
                    self._part(part, of_part, device)
                    for part, of_part in pieces(by_part[first : first + together])
                ]
                result, examples = self._mined(parts)
                results.append(result)
                shown |= examples
        shown = dict(sorted(shown.items())[:EXAMPLES])
        write_examples(self.search.folder, item.key, shown)
        return {**add_up_blocks(results), "part": item.key, "examples_at": list(shown)}

    def _part(self, part: Part, found: Sequence[TopK | None], device: str) -> _MinedPart:
        records = read_records(part.path)
        corpus = open_corpus(self.search.files)
        queries = queries_of(records, corpus)
        lists, lowest, own = [], [], []
        given = self.config.pool == "given"
        for vectors, of_corpus in zip(self.teachers, found, strict=True):
            asked = vectors.queries(part)
            if of_corpus is not None:
                candidates = candidates_of(*of_corpus, corpus.text_hash)
            else:
                of_rows = given_lists(records, asked, vectors.given(part))
                texts = given_texts(records)
                hashes = np.array([text_hash(text) for text in texts], dtype=np.int64)
                candidates = candidates_of(*of_rows, hashes)
            skip = self.config.skip
            lists.append(
                without_ineligible(candidates, queries, corpus, skip=skip, given=not given)
            )
            scores = positive_scores(queries, asked, corpus, vectors)
            lowest.append(lowest_of_queries(queries.positive_of, scores)[queries.of_row])
            own.append(of_own_positives(queries, scores))
        positives = positive_texts(records, queries, corpus)
        read = _reader(records, corpus, given)
        decided, crossed = self._decided(records, queries, lists, lowest, positives, read, device)
        kept, dropped = self._kept(records, queries, corpus, positives)
        return _MinedPart(
            records,
            queries,
            corpus,
            kept,
            dropped,
            lists,
            own[0],
            crossed,
            decided,
            positives,
        )

    def _mined(self, parts: Sequence[_MinedPart]) -> tuple[Result, dict[int, dict[str, Any]]]:
        """Select negatives for parts whose candidates' texts are read together, and write them;
        return statistics and examples.
        """
        given = self.config.pool == "given"
        read = _reader(parts[0].records, parts[0].corpus, given)  # a given pool has units of a part
        chosen, texts, copies = self._chosen(parts, read)
        written, done = [], []
        shown: dict[int, dict[str, Any]] = {}
        for part, of_part in zip(parts, chosen, strict=True):
            rows = [
                replace(
                    record,
                    negatives=(
                        *part.kept[row],
                        *(self._negative(part, texts, row, one) for one in of_part[row]),
                    ),
                    **scores_of_positives(
                        part.own[row], None if part.crossed is None else part.crossed[row]
                    ),
                )
                for row, record in enumerate(part.records)
            ]
            new = write_part(self.folder, rows)
            written.append([new.name, new.rows])
            shown |= _examples(rows, part.decided[0], read)
            done += rows
        decided = [one for part in parts for one in part.decided]
        result = {
            "rows_in": sum(len(part.records) for part in parts),
            "rows_out": len(done),
            "rejected": {},
            "parts": written,
            "mined": sum(len(of_row) for of_part in chosen for of_row in of_part),
            "without_negatives": sum(not record.negatives for record in done),
            "short": sum(len(r.negatives) < self.config.num_negatives for r in done),
            "candidates": sum(count_candidates(part.lists) for part in parts),
            "refused": refused_counts(
                [one.candidates for one in decided], copies, sum(part.dropped for part in parts)
            ),
            "vague": sum(int(p.corpus.is_vague(p.queries.asked_hash).sum()) for p in parts),
            "histograms": _histograms([part.decided for part in parts], chosen),
        }
        return result, shown

    def _kept(
        self,
        records: Sequence[Record],
        queries: Queries,
        corpus: CorpusIndex,
        positives: Sequence[Sequence[str]],
    ) -> tuple[list[tuple[Negative, ...]], int]:
        """Return the rows' own hard negatives that they keep, and how many were refused because
        they equal the query or a positive.
        """
        if self.config.pool == "given":
            return [()] * len(records), 0
        own = [
            set(map(same_text_form, (records[row].query, *texts)))
            for row, texts in zip(queries.first_row.tolist(), positives, strict=True)
        ]
        asker = queries.of_row.tolist()
        copied = [
            same_text_form(negative.text) in own[asker[row]]
            for row, record in enumerate(records)
            for negative in record.negatives
        ]
        bad = given_positives(queries, corpus) | np.array(copied, dtype=bool)
        by_row = np.split(bad, np.searchsorted(queries.given_of, np.arange(1, len(records))))
        kept = [
            tuple(n for n, refused in zip(record.negatives, of_row, strict=True) if not refused)
            for record, of_row in zip(records, by_row, strict=False)
        ]
        return kept, int(bad.sum())

    def _decided(
        self,
        records: Sequence[Record],
        queries: Queries,
        lists: Sequence[MinedCandidates],
        lowest: Sequence[np.ndarray],
        positives: Sequence[Sequence[str]],
        read: ReadTexts,
        device: str,
    ) -> tuple[list[RankedCandidates], list[list[float]] | None]:
        """Apply the mining rule to each teacher's list, rescored if settings say so; also return
        the cross-encoder's scores of the positives.
        """
        scores: Sequence[np.ndarray | None] = [None] * len(lists)
        crossed = None
        if self.config.rescoring is not None:
            asked = [records[row].query for row in queries.first_row]
            score = self.load_cross_encoder(self.config.rescoring, self.cross_encoder, device)
            near = self.config.near_duplicate
            lists, scores, of_positives = rescore(
                lists, queries.of_row, asked, positives, read, near, score
            )
            count = np.array([len(texts) for texts in positives])
            of_queries = lowest_of_queries(np.repeat(np.arange(len(count)), count), of_positives)
            lowest = [of_queries[queries.of_row]] * len(lists)
            firsts = (count.cumsum() - count).tolist()
            crossed = [
                [float(of_positives[firsts[q] + positives[q].index(t)]) for t in record.positives]
                for q, record in zip(queries.of_row.tolist(), records, strict=True)
            ]
        decided = [
            rank_candidates(*of_teacher, self.config, salts(records, self.search.seed, number))
            for number, of_teacher in enumerate(zip(lists, scores, lowest, strict=True))
        ]
        return decided, crossed

    def _chosen(
        self, parts: Sequence[_MinedPart], read: ReadTexts
    ) -> tuple[list[list[list[SelectedNegative]]], dict[int, str], int]:
        """Select the negatives of each part's rows; return them with their texts by id and the
        number of skipped copies.
        """
        texts: dict[int, str] = {}
        first_query = np.cumsum([0, *(len(part.positives) for part in parts)])
        of_row = [part.queries.of_row + n for part, n in zip(parts, first_query, strict=False)]
        query_of = np.concatenate(of_row)
        positives = [texts_of for part in parts for texts_of in part.positives]
        queries = [part.records[row].query for part in parts for row in part.queries.first_row]

        def add(documents: Collection[int]) -> None:
            texts.update(read([one for one in documents if one not in texts]))

        def copies(asked: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
            add(set().union(*asked.values()))
            return copies_among(asked, texts, query_of, queries, positives, similarity)

        similarity = self.config.near_duplicate
        # Rescoring read all texts and took the copies out.
        checked = self.config.rescoring is not None
        wanted = [
            max(self.config.num_negatives - len(negatives), 0)
            for part in parts
            for negatives in part.kept
        ]
        lists = [
            of_row
            for part in parts
            for of_row in zip(*(one.documents() for one in part.decided), strict=True)
        ]
        chosen, met = select_negatives(lists, wanted, None if checked else copies)
        add({one.document for of_row in chosen for one in of_row})
        rows = iter(chosen)
        return [list(islice(rows, len(part.records))) for part in parts], texts, met

    def _negative(
        self, part: _MinedPart, texts: Mapping[int, str], row: int, chosen: SelectedNegative
    ) -> Negative:
        of_teacher = part.decided[chosen.teacher]
        rank = int(of_teacher.order[row, chosen.place])
        return Negative(
            text=texts[chosen.document],
            rank=rank,
            score=float(part.lists[chosen.teacher].scores[row, rank]),
            rule=self.config.rule.kind,
            teacher=self.teachers[chosen.teacher].weights,
            cross_score=float(of_teacher.scores[row, rank]) if of_teacher.rescored else None,
        )


def _reader(records: Sequence[Record], corpus: CorpusIndex, given: bool) -> ReadTexts:
    """Return the function that reads candidates' texts by id, from the corpus or from the rows'
    given negatives.
    """
    if not given:
        return corpus.texts_of
    texts = given_texts(records)
    return lambda documents: {document: texts[document] for document in documents}


def _histograms(
    decided: Sequence[Sequence[RankedCandidates]],
    chosen: Sequence[Sequence[Sequence[SelectedNegative]]],
) -> list[dict[str, list[int]]]:
    """Make histograms, for each teacher, of the scores that the mining rule compared: positives,
    chosen and refused candidates.
    """
    found = []
    for number in range(len(decided[0])):
        parts = [of_part[number] for of_part in decided]
        negative = []
        for one, of_part in zip(parts, chosen, strict=True):
            of = [
                (row, c.place)
                for row, taken in enumerate(of_part)
                for c in taken
                if c.teacher == number
            ]
            rows, places = np.array(of, dtype=np.int64).reshape(-1, 2).T
            negative.append(one.scores[rows, one.order[rows, places]])
        refused = [one.scores[one.candidates.status == RULE] for one in parts]
        found.append(
            {
                "positive": histogram(np.concatenate([one.positive_scores for one in parts])),
                "negative": histogram(np.concatenate(negative)),
                "refused_by_rule": histogram(np.concatenate(refused)),
            }
        )
    return found


def _examples(
    records: Sequence[Record], decided: RankedCandidates, read: ReadTexts
) -> dict[int, dict[str, Any]]:
    """Describe some rows for the audit page, keyed by their order over all parts.

    Each with what the rule refused of the first teacher's list.
    """
    ids, scores = decided.candidates.ids, decided.scores
    shown = []
    for order, row in rows_to_show(records):
        columns = np.flatnonzero(decided.candidates.status[row] == RULE)
        best = columns[np.argsort(-scores[row, columns], kind="stable")][:_REFUSED_SHOWN]
        shown.append((order, row, best))
    texts = read({int(ids[row, column]) for _, row, best in shown for column in best})
    return {
        order: example(
            records[row],
            [(texts[int(ids[row, column])], float(scores[row, column])) for column in best],
            float(decided.positive_scores[row]),
        )
        for order, row, best in shown
    }

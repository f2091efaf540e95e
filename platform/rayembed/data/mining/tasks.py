"""The mining task: finds the hard negatives of a part's rows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayembed.config.mining import CrossEncoder, MiningConfig
from rayembed.data.hashes import text_hash
from rayembed.data.mining.candidates import (
    RULE,
    Candidates,
    RankedCandidates,
    candidates_of,
    given_positives,
    rank_candidates,
    salts,
    without_ineligible,
)
from rayembed.data.mining.corpus import Corpus, CorpusFiles, open_corpus
from rayembed.data.mining.counts import (
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
    given_texts,
    lowest_scores,
    positive_texts,
    queries_of,
)
from rayembed.data.mining.rescoring import Scorer, load_cross_encoder, rescore
from rayembed.data.mining.selection import SelectedNegative, copies_among, select_negatives
from rayembed.data.parts import read_records, write_part
from rayembed.data.records import Negative, Record
from rayembed.data.vectors.embed import PartItem, Vectors
from rayembed.data.work_items import Result
from rayembed.search.exact import top_k

_REFUSED_SHOWN = 3
"""Best refused candidates shown in an example."""

ReadTexts = Callable[[Collection[int]], Mapping[int, str]]


@dataclass(frozen=True)
class MiningTeacher:
    """A teacher's vectors of all parts and the fingerprint of its weights."""

    vectors: Vectors
    weights: str


@dataclass(frozen=True)
class MinePart:
    """Task: write the records of a part with hard negatives."""

    folder: str
    """Folder of the output parts."""
    examples: str
    """Folder of each part's examples; `counts.add_up_mining` reads some."""
    files: CorpusFiles
    teachers: tuple[MiningTeacher, ...]
    """Teachers in the order in which they take turns."""
    config: MiningConfig
    seed: int
    """Seed of draws."""
    cross_encoder: str = ""
    """Fingerprint of the cross-encoder's weights, if `config` names one."""
    load_cross_encoder: Callable[[CrossEncoder, str, str], Scorer] = load_cross_encoder

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Report the new part and the statistics that `counts.add_up_mining` aggregates."""
        records = read_records(item.part.path)
        corpus = open_corpus(self.files)
        queries = queries_of(records, corpus)
        lists, lowest = [], []
        for teacher in self.teachers:
            vectors = teacher.vectors.queries(item.part)
            lists.append(self._candidates(item, records, queries, corpus, teacher, vectors, device))
            lowest.append(lowest_scores(queries, vectors, corpus, teacher.vectors))
        read = _reader(records, corpus, self.config.pool == "given")
        positives = positive_texts(records, queries, corpus)
        decided = self._decided(records, queries, lists, lowest, positives, read, device)
        kept, dropped = self._kept(records, queries, corpus)
        chosen, texts, copies = self._chosen(decided, queries, kept, positives, read)
        done = [
            replace(
                record,
                negatives=(
                    *kept[row],
                    *(self._negative(lists, decided, texts, row, one) for one in chosen[row]),
                ),
                positive_score=float(lowest[0][row]),
                positive_cross_score=(
                    float(decided[0].positive_scores[row]) if decided[0].rescored else None
                ),
            )
            for row, record in enumerate(records)
        ]
        part = write_part(self.folder, done)
        shown = _examples(done, decided[0], read)
        write_examples(self.examples, part.digest, shown)
        return {
            "rows_in": len(records),
            "rows_out": len(done),
            "rejected": {},
            "parts": [[part.name, part.rows]],
            "mined": sum(map(len, chosen)),
            "without": sum(not record.negatives for record in done),
            "short": sum(len(r.negatives) < self.config.num_negatives for r in done),
            "candidates": count_candidates(lists),
            "refused": refused_counts([one.candidates for one in decided], copies, dropped),
            "vague": int(corpus.is_vague(queries.query_hash).sum()),
            "histograms": _histograms(decided, chosen),
            "part": part.digest,
            "examples_at": list(shown),
        }

    def _candidates(
        self,
        item: PartItem,
        records: Sequence[Record],
        queries: Queries,
        corpus: Corpus,
        teacher: MiningTeacher,
        vectors: np.ndarray,
        device: str,
    ) -> Candidates:
        """Candidate lists of a teacher, without certain non-negatives."""
        given = self.config.pool == "given"
        if given:
            found = given_lists(records, vectors, teacher.vectors.given(item.part))
            hashes = np.array([text_hash(text) for text in given_texts(records)], dtype=np.int64)
        else:
            shards = corpus.shards(teacher.vectors)
            found = top_k(vectors, shards, self.config.candidates, device)
            hashes = corpus.text_hash
        lists = candidates_of(*found, hashes)
        return without_ineligible(lists, queries, corpus, skip=self.config.skip, given=not given)

    def _kept(
        self, records: Sequence[Record], queries: Queries, corpus: Corpus
    ) -> tuple[list[tuple[Negative, ...]], int]:
        """Own negatives that each row keeps, and the number refused as positives of the same query
        in any row.
        """
        if self.config.pool == "given":
            return [()] * len(records), 0
        bad = given_positives(queries, corpus)
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
        lists: Sequence[Candidates],
        lowest: Sequence[np.ndarray],
        positives: Sequence[Sequence[str]],
        read: ReadTexts,
        device: str,
    ) -> list[RankedCandidates]:
        scores: Sequence[np.ndarray | None] = [None] * len(lists)
        if self.config.rescoring is not None:
            asked = [records[row].query for row in queries.first_row]
            score = self.load_cross_encoder(self.config.rescoring, self.cross_encoder, device)
            near = self.config.near_duplicate
            lists, scores, of_positives = rescore(
                lists, queries.of_row, asked, positives, read, near, score
            )
            lowest = [of_positives] * len(lists)
        return [
            rank_candidates(*of_teacher, self.config, salts(records, self.seed, number))
            for number, of_teacher in enumerate(zip(lists, scores, lowest, strict=True))
        ]

    def _chosen(
        self,
        decided: Sequence[RankedCandidates],
        queries: Queries,
        kept: Sequence[Sequence[Negative]],
        positives: Sequence[Sequence[str]],
        read: ReadTexts,
    ) -> tuple[list[list[SelectedNegative]], dict[int, str], int]:
        """Negatives of each row, their texts by id, and the number of copies met."""
        texts: dict[int, str] = {}

        def add(documents: Collection[int]) -> None:
            texts.update(read([one for one in documents if one not in texts]))

        def copies(asked: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
            add(set().union(*asked.values()))
            assert similarity is not None
            return copies_among(asked, texts, queries.of_row, positives, similarity)

        similarity = self.config.near_duplicate
        # Rescoring read all texts and took the copies out.
        checked = similarity is None or self.config.rescoring is not None
        wanted = [max(self.config.num_negatives - len(negatives), 0) for negatives in kept]
        by_teacher = [one.documents() for one in decided]
        lists = list(zip(*by_teacher, strict=True))
        chosen, met = select_negatives(lists, wanted, None if checked else copies)
        add({one.document for of_row in chosen for one in of_row})
        return chosen, texts, met

    def _negative(
        self,
        lists: Sequence[Candidates],
        decided: Sequence[RankedCandidates],
        texts: Mapping[int, str],
        row: int,
        chosen: SelectedNegative,
    ) -> Negative:
        of_teacher = decided[chosen.teacher]
        rank = int(of_teacher.order[row, chosen.place])
        return Negative(
            text=texts[chosen.document],
            rank=rank,
            score=float(lists[chosen.teacher].scores[row, rank]),
            rule=self.config.rule.kind,
            teacher=self.teachers[chosen.teacher].weights,
            cross_score=float(of_teacher.scores[row, rank]) if of_teacher.rescored else None,
        )


def _reader(records: Sequence[Record], corpus: Corpus, given: bool) -> ReadTexts:
    """Function that reads candidates' texts by id."""
    if not given:
        return corpus.texts_of
    texts = given_texts(records)
    return lambda documents: {document: texts[document] for document in documents}


def _histograms(
    decided: Sequence[RankedCandidates], chosen: Sequence[Sequence[SelectedNegative]]
) -> list[dict[str, str]]:
    """Histograms of each teacher's scores that the rule used."""
    found = []
    for number, one in enumerate(decided):
        of = [
            (row, c.place) for row, taken in enumerate(chosen) for c in taken if c.teacher == number
        ]
        rows, places = np.array(of, dtype=np.int64).reshape(-1, 2).T
        found.append(
            {
                "positive": histogram(one.positive_scores),
                "negative": histogram(one.scores[rows, one.order[rows, places]]),
                "refused_by_rule": histogram(one.scores[one.candidates.status == RULE]),
            }
        )
    return found


def _examples(
    records: Sequence[Record], decided: RankedCandidates, read: ReadTexts
) -> dict[int, dict[str, Any]]:
    """Examples of rows, by their order over all parts.

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

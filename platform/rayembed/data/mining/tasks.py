"""Mining over parts: a task that finds the hard negatives of a part's rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rayembed.config.mining import MiningConfig
from rayembed.data.mining.rules import (
    Corpus,
    mine,
    query_of,
    with_negatives,
)
from rayembed.data.parts import Part, read_records, read_table, write_part
from rayembed.data.units import Result
from rayembed.data.vectors.embed import PartUnit, Vectors


@dataclass(frozen=True)
class MinePart:
    """Task: the records of a part with hard negatives from the positives of all parts."""

    folder: str
    """Where the new parts go."""
    vectors: Vectors
    corpus: tuple[Part, ...]
    config: MiningConfig
    teacher: str
    """Fingerprint of its weights."""

    def __call__(self, unit: PartUnit, device: str = "cpu") -> Result:
        """`part` and `rows` of the new part, `mined` negatives, rows `without` any negative."""
        records = read_records(unit.part.path)
        queries = self.vectors.queries(unit.part)
        positive_scores = self._positive_scores(unit.part, queries)
        mined = mine(
            queries,
            positive_scores,
            [query_of(record) for record in records],
            self._shards(),
            self._corpus.known,
            num_negatives=self.config.num_negatives,
            max_relative_score=getattr(self.config.rule, "max_relative_score", 1.0),
            candidates=self.config.candidates,
            device=device,
        )
        texts = self._texts({f.document for found in mined for f in found})
        done = [
            with_negatives(
                record,
                [(texts[f.document], f) for f in found],
                score,
                self.teacher,
                self.config.num_negatives,
            )
            for record, found, score in zip(records, mined, positive_scores.tolist(), strict=True)
        ]
        part = write_part(self.folder, done)
        return {
            "rows_in": len(records),
            "rows_out": len(done),
            "rejected": {},
            "parts": [[part.path.rsplit("/", 1)[-1], part.rows]],
            "mined": sum(len(found) for found in mined),
            "without": sum(not record.negatives for record in done),
        }

    def _positive_scores(self, part: Part, queries: np.ndarray) -> np.ndarray:
        texts = self.vectors.texts(part)
        places = texts.place[texts.first[:-1]]
        documents = self.vectors.documents(part)[places]
        product = queries.astype(np.float32) * documents.astype(np.float32)
        return np.asarray(product.sum(1), dtype=np.float32)

    def _shards(self) -> Iterator[np.ndarray]:
        for part, keep in zip(self.corpus, self._corpus.keep, strict=True):
            yield self.vectors.documents(part)[keep]

    def _texts(self, documents: set[int]) -> dict[int, str]:
        """The texts of documents, reading each part that has some of them once."""
        texts = {}
        wanted = np.array(sorted(documents), dtype=np.int64)
        ends = np.cumsum([keep.sum() for keep in self._corpus.keep])
        for number, part in enumerate(self.corpus):
            first = int(ends[number - 1]) if number else 0
            mine_ = wanted[(wanted >= first) & (wanted < ends[number])]
            if not len(mine_):
                continue
            rows = read_table(part.path, ["positives"])["positives"].to_pylist()
            distinct = list(dict.fromkeys(text for row in rows for text in row))
            kept = np.flatnonzero(self._corpus.keep[number])
            texts.update({int(d): distinct[kept[d - first]] for d in mine_})
        return texts

    @cached_property
    def _corpus(self) -> "_KeptDocuments":
        return _read_corpus(self.vectors, self.corpus)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "_corpus"}


@dataclass(frozen=True)
class _KeptDocuments:
    keep: list[np.ndarray]
    """For each part (M,) bool: the text did not occur before."""
    known: Corpus


def _read_corpus(vectors: Vectors, parts: Sequence[Part]) -> _KeptDocuments:
    hashes, labels = [], []
    for part in parts:
        texts = vectors.texts(part)
        hashes.append(texts.text_hash)
        labels.append(np.stack([texts.label_of, texts.label_hash]))
    every = np.concatenate(hashes)
    keep = np.zeros(len(every), dtype=bool)
    keep[np.unique(every, return_index=True)[1]] = True
    edges = np.cumsum([len(h) for h in hashes])[:-1]
    classes: dict[int, frozenset[int]] = {}
    for of, label in np.concatenate(labels, axis=1).T.tolist():
        classes[of] = classes.get(of, frozenset()) | {label}
    known = every[keep]
    by_document = [classes.get(h, frozenset()) for h in known.tolist()] if classes else None
    return _KeptDocuments(np.split(keep, edges), Corpus(known, by_document))

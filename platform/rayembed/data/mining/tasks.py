"""Mining over parts: a task that embeds a part, a task that mines its negatives.

Vectors are kept as float16 in files named by the teacher's settings and the part's content, so
that they serve every later run that needs the same.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.data import MiningConfig
from rayembed.data.hashes import NO_HASH, text_hash
from rayembed.data.mining.rules import (
    Corpus,
    label_hash,
    mine,
    query_of,
    with_negatives,
)
from rayembed.data.mining.teacher import Encoder, load_teacher
from rayembed.data.parts import Part, read_records, read_table, write_part
from rayembed.data.records import Record
from rayembed.data.units import Result


@dataclass(frozen=True)
class PartUnit:
    """One part as a unit of work."""

    part: Part

    @property
    def key(self) -> str:
        """The part's content."""
        return self.part.digest


@dataclass(frozen=True)
class EmbedPart:
    """Task: the vectors of a part's queries and of its distinct positives."""

    folder: str
    """Where vectors are kept, for one setting of the teacher."""
    config: MiningConfig
    load: Callable[[MiningConfig, str], Encoder] = load_teacher

    def __call__(self, unit: PartUnit, device: str = "cpu") -> Result:
        """`documents`: how many distinct positives there are."""
        index_path, query_path, document_path = _paths(self.folder, unit.part)
        rows = unit.part.rows
        if exists(index_path):  # written last
            with np.load(io.BytesIO(read_bytes(index_path))) as index:
                count = len(index["text_hash"])
            return {"rows_in": rows, "rows_out": rows, "rejected": {}, "documents": count}
        records = read_records(unit.part.path)
        texts, index = _documents(records)
        encoder = self.load(self.config, device)
        _save(query_path, encoder([r.query for r in records], "query").astype(np.float16))
        _save(document_path, encoder(texts, "document").astype(np.float16))
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **index)
        write_atomic(index_path, buffer.getvalue())
        return {"rows_in": rows, "rows_out": rows, "rejected": {}, "documents": len(texts)}


@dataclass(frozen=True)
class MinePart:
    """Task: the records of a part with hard negatives from the positives of all parts."""

    folder: str
    """Where the new parts go."""
    vectors: str
    """Where `EmbedPart` left the vectors."""
    corpus: tuple[Part, ...]
    config: MiningConfig
    teacher: str
    """Fingerprint of its weights."""

    def __call__(self, unit: PartUnit, device: str = "cpu") -> Result:
        """`part` and `rows` of the new part, `mined` negatives, rows `without` any negative."""
        records = read_records(unit.part.path)
        queries = _load(_paths(self.vectors, unit.part)[1])
        positive_scores = self._positive_scores(unit.part, queries)
        mined = mine(
            queries,
            positive_scores,
            [query_of(record) for record in records],
            self._shards(),
            self._corpus.known,
            num_negatives=self.config.num_negatives,
            max_relative_score=self.config.max_relative_score,
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
        index, _, documents = _paths(self.vectors, part)
        with np.load(io.BytesIO(read_bytes(index))) as loaded:
            places = loaded["first_positive"]
        product = queries.astype(np.float32) * _load(documents)[places].astype(np.float32)
        return np.asarray(product.sum(1), dtype=np.float32)

    def _shards(self) -> Iterator[np.ndarray]:
        for part, keep in zip(self.corpus, self._corpus.keep, strict=True):
            yield _load(_paths(self.vectors, part)[2])[keep]

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


def _read_corpus(vectors: str, parts: Sequence[Part]) -> _KeptDocuments:
    hashes, labels = [], []
    for part in parts:
        with np.load(io.BytesIO(read_bytes(_paths(vectors, part)[0]))) as loaded:
            hashes.append(loaded["text_hash"])
            labels.append(np.stack([loaded["label_of"], loaded["label_hash"]]))
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


def _documents(records: Sequence[Record]) -> tuple[list[str], dict[str, np.ndarray]]:
    """The distinct positives and what is known of them.

    Returns:
        The texts (M), and arrays: `text_hash` (M,), `first_positive` (rows,) place of each row's
        first positive, `label_of` and `label_hash` (L,) pairs of a text's hash and a class.
    """
    places: dict[str, int] = {}
    classes: dict[tuple[int, int], None] = {}
    for record in records:
        label = label_hash(record.label)
        for text in record.positives:
            places.setdefault(text, len(places))
            if label != NO_HASH:
                classes[text_hash(text), label] = None
    pairs = np.array(list(classes), dtype=np.int64).reshape(-1, 2)
    first = [places[record.positives[0]] for record in records]
    return list(places), {
        "text_hash": np.array([text_hash(text) for text in places], dtype=np.int64),
        "first_positive": np.array(first, dtype=np.int64),
        "label_of": pairs[:, 0],
        "label_hash": pairs[:, 1],
    }


def _paths(folder: str, part: Part) -> tuple[str, str, str]:
    """Files of the index, the queries' vectors and the documents' vectors."""
    return (
        join(folder, f"{part.digest}.index.npz"),
        join(folder, f"{part.digest}.queries.npy"),
        join(folder, f"{part.digest}.documents.npy"),
    )


def _save(path: str, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomic(path, buffer.getvalue())


def _load(path: str) -> np.ndarray:
    return np.asarray(np.load(io.BytesIO(read_bytes(path))))

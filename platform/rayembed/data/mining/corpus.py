"""The documents to mine from: what is known of all of them, vectors and texts on disk.

Documents are the positives of all rows and those of a corpus of their own. A text counts once,
where it comes first; its id is its place among those. A process holds some 60 bytes of each
document, 110 while it begins (`benchmarks/index_memory.py`), and reads vectors and texts part by
part.

N documents, M distinct texts of a part, D embedding width.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.data.hashes import mixed
from rayembed.data.parts import Part, read_index, read_table
from rayembed.data.vectors.embed import PartTexts, Vectors

MOST_SHARED = 1000
"""Positives up to which rows that ask the same share theirs. A query of more ("Untitled") tells
nothing of them; and its positives are read for every part that asks it."""


@dataclass(frozen=True)
class CorpusFiles:
    """Where the documents lie."""

    records: tuple[Part, ...]
    """Parts of rows, whose positives are documents."""
    documents: tuple[Part, ...]
    """Parts of further documents."""
    index: Vectors
    """Vectors of any teacher; beside them stands which texts a part has."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, in the order of their documents."""
        return (*self.records, *self.documents)


@dataclass(frozen=True)
class Corpus:
    """What is known of all documents in memory."""

    files: CorpusFiles
    keep: tuple[np.ndarray, ...]
    """For each part (M,) bool: the text did not come before."""
    starts: np.ndarray
    """(parts + 1,) int64 id of each part's first document; at the end N."""
    text_hash: np.ndarray
    """(N,) int64 by id."""
    by_hash: np.ndarray
    """(N,) int64 ids in the order of their hashes."""
    classes: np.ndarray
    """Sorted uint64, one of each text and class that it has; see `of_class`."""
    shared_query: np.ndarray
    """(S,) int64, sorted: the hash of a query that several rows ask, once for each positive where
    there are up to `MOST_SHARED`."""
    shared_document: np.ndarray
    """(S,) int64: a positive of that query."""
    vague_query: np.ndarray
    """int64, sorted: the hashes of queries that are not among those, for too many positives."""

    def shards(self, vectors: Vectors) -> Iterator[np.ndarray]:
        """The vectors of all documents by id, float16 and part by part."""
        for part, keep in zip(self.files.parts, self.keep, strict=True):
            found = vectors.documents(part)
            yield found if keep.all() else found[keep]

    def vectors_of(
        self, vectors: Vectors, documents: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """(n, D) float16 of documents, sorted ids that may repeat: those of one part at a time,
        with where they stand among the ids. Only parts that have some are read.
        """
        for number, inside in self._by_part(documents):
            places = np.flatnonzero(self.keep[number])[inside]
            start = int(np.searchsorted(documents, self.starts[number]))
            found = vectors.documents(self.files.parts[number])
            yield slice(start, start + len(inside)), found[places]

    def texts_of(self, documents: Collection[int]) -> dict[int, str]:
        """The texts of documents by id; only parts that have some are read."""
        texts: dict[int, str] = {}
        wanted = np.array(sorted(documents), dtype=np.int64)
        for number, inside in self._by_part(wanted):
            places = np.flatnonzero(self.keep[number])[inside]
            found = self._read_texts(number, places)
            texts.update(zip((inside + self.starts[number]).tolist(), found, strict=True))
        return texts

    def ids_of(self, text_hash: np.ndarray) -> np.ndarray:
        """The ids of documents, by hashes that the corpus has."""
        places = np.searchsorted(self.text_hash, text_hash, sorter=self.by_hash)
        return np.asarray(self.by_hash[places])

    def of_class(self, text_hash: np.ndarray, label_hash: np.ndarray) -> np.ndarray:
        """Whether texts have a class; both arrays of one shape, bool of that shape comes back."""
        return among(self.classes, pair_hash(text_hash, label_hash))

    def shares(self, query_hash: np.ndarray) -> np.ndarray:
        """(n,) bool: several rows ask the query, and share their positives."""
        return among(self.shared_query, query_hash)

    def asked_too_often(self, query_hash: np.ndarray) -> np.ndarray:
        """(n,) bool: several rows ask the query, with more positives than `MOST_SHARED`."""
        return among(self.vague_query, query_hash)

    def positives_of(self, query_hash: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of queries that rows share: the place in `query_hash` and a positive, for each."""
        first = np.searchsorted(self.shared_query, query_hash, "left")
        count = np.searchsorted(self.shared_query, query_hash, "right") - first
        of = np.repeat(np.arange(len(query_hash)), count)
        within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        return of, self.shared_document[first[of] + within]

    def _by_part(self, documents: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Numbers of the parts that have some of the ids (sorted), these counted from its first."""
        edges = np.searchsorted(documents, self.starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            inside = documents[edges[number] : edges[number + 1]]
            yield number, inside - self.starts[number]

    def _read_texts(self, number: int, places: np.ndarray) -> list[str]:
        part = self.files.parts[number]
        if number >= len(self.files.records):
            column = read_table(part.path, ["text"])["text"]
        else:
            column = pc.list_flatten(read_table(part.path, ["positives"])["positives"])
            # Places count distinct texts; where each comes first among all of them:
            places = np.unique(self.files.index.texts(part).place, return_index=True)[1][places]
        return list(column.take(pa.array(places)).to_pylist())


@lru_cache(maxsize=1)
def open_corpus(files: CorpusFiles) -> Corpus:
    """What is known of the documents, read once a process."""
    texts = [files.index.texts(part) for part in files.parts]
    hashes = [known.text_hash for known in texts]
    every = np.concatenate([np.empty(0, np.int64), *hashes])
    keep = np.zeros(len(every), dtype=bool)
    keep[np.unique(every, return_index=True)[1]] = True
    kept = np.split(keep, np.cumsum([len(one) for one in hashes])[:-1])
    text_hash = every[keep]
    classes = [pair_hash(known.label_of, known.label_hash) for known in texts]
    by_hash = np.argsort(text_hash)
    query, document_hash, vague = _shared(files.records, texts)
    document = by_hash[np.searchsorted(text_hash, document_hash, sorter=by_hash)]
    return Corpus(
        files=files,
        keep=tuple(kept),
        starts=np.cumsum([0, *(int(one.sum()) for one in kept)]),
        text_hash=text_hash,
        by_hash=by_hash,
        classes=np.unique(np.concatenate([np.empty(0, np.uint64), *classes])),
        shared_query=query,
        shared_document=document,
        vague_query=vague,
    )


def among(wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each value is one of those wanted, which are sorted; bool of the values' shape."""
    if not len(wanted):
        return np.zeros(values.shape, dtype=bool)
    places = np.searchsorted(wanted, values).clip(max=len(wanted) - 1)
    return np.asarray(wanted[places] == values)


def pair_hash(text_hash: np.ndarray, other: np.ndarray) -> np.ndarray:
    """uint64 that stands for a text and another int64 together, such as its class."""
    return mixed(text_hash.view(np.uint64) ^ mixed(other))


def _shared(
    parts: tuple[Part, ...], texts: list[PartTexts]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hashes of queries that several rows ask, sorted, each with the hash of a positive; and of
    those that have too many positives.
    """
    asked = read_index(parts).query_hash
    distinct, times = np.unique(asked, return_counts=True)
    several = distinct[times > 1]
    pairs = [np.empty((2, 0), np.int64)]
    first_row = 0
    for part, known in zip(parts, texts, strict=False):  # parts of further documents come after
        of = np.repeat(asked[first_row : first_row + part.rows], np.diff(known.first))
        chosen = among(several, of)
        pairs.append(np.stack([of[chosen], known.text_hash[known.place[chosen]]]))
        first_row += part.rows
    query, document = np.unique(np.concatenate(pairs, axis=1), axis=1)
    found, count = np.unique(query, return_counts=True)
    vague = found[count > MOST_SHARED]
    kept = ~among(vague, query)
    return query[kept], document[kept], vague

"""The corpus to mine from: metadata of all documents in memory, vectors and texts on disk.

Documents are the positives of all rows and those of a separate corpus. A text counts once, at its
first occurrence; its id is its rank among first occurrences. A process holds some 60 bytes of each
document, 110 while it starts (`benchmarks/index_memory.py`), and reads vectors and texts part by
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
from rayembed.data.index import read_column
from rayembed.data.parts import Part, read_table
from rayembed.data.vectors.embed import PartTexts, Vectors

MOST_SHARED = 1000
"""Maximum number of positives that rows with the same query share. A query with more ("Untitled")
says nothing about them, and they would be read for every part that has it."""


@dataclass(frozen=True)
class CorpusFiles:
    """Locations of the corpus' documents and vectors."""

    records: tuple[Part, ...]
    """Parts of rows, whose positives are documents."""
    documents: tuple[Part, ...]
    """Parts of additional documents."""
    index: Vectors
    """Vector files of any teacher; they also record which texts a part has."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order of their documents."""
        return (*self.records, *self.documents)


@dataclass(frozen=True)
class Corpus:
    """In-memory metadata of all documents."""

    files: CorpusFiles
    keep: tuple[np.ndarray, ...]
    """Masks (M,) bool, one for each part, of the texts that occur in no earlier part."""
    starts: np.ndarray
    """(parts + 1,) int64 id of each part's first document; the last entry is N."""
    text_hash: np.ndarray
    """(N,) int64 text hash by id."""
    by_hash: np.ndarray
    """(N,) int64 ids sorted by hash."""
    classes: np.ndarray
    """Sorted uint64 hashes of text and class, one for each class of a text; see `of_class`."""
    shared_query: np.ndarray
    """(S,) int64, sorted: hash of a query that several rows have, repeated for each of its
    positives; only queries with at most `MOST_SHARED`."""
    shared_document: np.ndarray
    """(S,) int64 hash of a positive of that query."""
    vague_query: np.ndarray
    """int64, sorted: hashes of the queries with more positives than `MOST_SHARED`."""

    def shards(self, vectors: Vectors) -> Iterator[np.ndarray]:
        """Vectors of all documents by id, float16, part by part."""
        for part, keep in zip(self.files.parts, self.keep, strict=True):
            found = vectors.documents(part)
            yield found if keep.all() else found[keep]

    def vectors_of(
        self, vectors: Vectors, documents: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """(n, D) float16 vectors of documents, given sorted ids with repetition: one part at a
        time, with their positions among the ids. Only parts with requested ids are read.
        """
        for number, inside in self._by_part(documents):
            places = np.flatnonzero(self.keep[number])[inside]
            start = int(np.searchsorted(documents, self.starts[number]))
            found = vectors.documents(self.files.parts[number])
            yield slice(start, start + len(inside)), found[places]

    def texts_of(self, documents: Collection[int]) -> dict[int, str]:
        """Texts of documents by id; only parts with requested ids are read."""
        texts: dict[int, str] = {}
        wanted = np.array(sorted(documents), dtype=np.int64)
        for number, inside in self._by_part(wanted):
            places = np.flatnonzero(self.keep[number])[inside]
            found = self._read_texts(number, places)
            texts.update(zip((inside + self.starts[number]).tolist(), found, strict=True))
        return texts

    def ids_of(self, text_hash: np.ndarray) -> np.ndarray:
        """Ids of documents by hash; every hash must be in the corpus."""
        places = np.searchsorted(self.text_hash, text_hash, sorter=self.by_hash)
        return np.asarray(self.by_hash[places])

    def of_class(self, text_hash: np.ndarray, label_hash: np.ndarray) -> np.ndarray:
        """Whether texts have a class, elementwise; bool of the arrays' common shape."""
        return among(self.classes, pair_hash(text_hash, label_hash))

    def shares(self, query_hash: np.ndarray) -> np.ndarray:
        """(n,) bool: several rows have the query and share their positives."""
        return among(self.shared_query, query_hash)

    def is_vague(self, query_hash: np.ndarray) -> np.ndarray:
        """(n,) bool: several rows have the query, with more positives than `MOST_SHARED`."""
        return among(self.vague_query, query_hash)

    def positives_of(self, query_hash: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positives of shared queries, as pairs of an index into `query_hash` and a positive."""
        first = np.searchsorted(self.shared_query, query_hash, "left")
        count = np.searchsorted(self.shared_query, query_hash, "right") - first
        of = np.repeat(np.arange(len(query_hash)), count)
        within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        return of, self.shared_document[first[of] + within]

    def _by_part(self, documents: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Parts that have any of the sorted ids, with these counted from the part's first id."""
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
    """Load the corpus metadata, once for each process."""
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
    """Whether each value is in the sorted array `wanted`; bool of the values' shape."""
    if not len(wanted):
        return np.zeros(values.shape, dtype=bool)
    places = np.searchsorted(wanted, values).clip(max=len(wanted) - 1)
    return np.asarray(wanted[places] == values)


def pair_hash(text_hash: np.ndarray, other: np.ndarray) -> np.ndarray:
    """uint64 hash of a text combined with another int64, such as its class."""
    return mixed(text_hash.view(np.uint64) ^ mixed(other))


def _shared(
    parts: tuple[Part, ...], texts: list[PartTexts]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted hashes of queries that several rows have, each with a positive's hash; and queries
    with too many positives.
    """
    asked = read_column(parts, "query_hash")
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

"""The corpus that hard negatives are mined from: metadata of all documents in memory, vectors and
texts on disk.

Documents are the positives of all rows and those of a separate corpus, but for texts of benchmarks
in the latter. A text counts once, at its first occurrence; its id is its rank among first
occurrences. Metadata take some 25 bytes a document. Those of a large corpus stand in a file in this
machine's cache, which the first process makes and all map, so that they share its memory
(`benchmarks/index_memory.py`). Vectors and texts are read part by part.

N documents, M distinct texts of a part, D embedding width.
"""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.array_files import load_array, map_array, save_array
from rayembed.assets.cache import cache_folder, filled, mark_used, remove_unused
from rayembed.assets.local_copies import UNUSED_SECONDS, read_copied
from rayembed.assets.storage import file_name
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part, read_table
from rayembed.data.hashes import mixed
from rayembed.data.vectors.embed import PartTexts, Vectors
from rayembed.data.words import normalised_hash
from rayembed.errors import PlacementError
from rayembed.machine.hardware import free_memory

MOST_SHARED = 1000
"""Maximum number of positives that rows with the same query share. A query with more ("Untitled")
says nothing about them, and they would be read for every part that has it."""

CODE_VERSION = 1
"""Version of the metadata in the cache; raise it when the same files yield others."""

_MAPPED_DOCUMENTS = 1 << 20
"""Documents from which metadata are mapped; those of fewer take less than 30 MB in a process."""

_BYTES_OF_A_DOCUMENT = 68
"""Memory that metadata take while they are made (docs/data_mining.md)."""

_RANGE_DOCUMENTS = 1 << 20
"""Hashes that are sorted together while metadata are made."""

_READ_AT_ONCE = 32
"""Index files read at a time, as each read of object storage waits for its answer."""


@dataclass(frozen=True)
class CorpusFiles:
    """Files that hold the documents of the corpus and their vectors."""

    records: tuple[Part, ...]
    """Parts of rows, whose positives are documents."""
    documents: tuple[Part, ...]
    """Parts of additional documents."""
    index: Vectors
    """Vector files of any teacher; they also record which texts a part has."""
    excluded: str = ""
    """File of the ascending hashes of texts that are no documents, named by its content; rows have
    none of them. Empty: there is no such text."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order of their documents."""
        return (*self.records, *self.documents)


@dataclass(frozen=True)
class CorpusIndex:
    """Metadata of all documents of the corpus, as arrays in memory or memory-mapped."""

    files: CorpusFiles
    keep: np.ndarray
    """Masks (M,) bool of all parts, joined, of the texts that occur in no earlier part and are not
    excluded."""
    first_text: np.ndarray
    """(parts + 1,) int64 index of each part's first text in `keep`."""
    starts: np.ndarray
    """(parts + 1,) int64 id of each part's first document; the last entry is N."""
    text_hash: np.ndarray
    """(N,) int64 text hash by id."""
    sorted_hash: np.ndarray
    """(N,) int64 the hashes, ascending."""
    by_hash: np.ndarray
    """(N,) int32 ids in the order of `sorted_hash`, int64 beyond 2³¹ documents."""
    classes: np.ndarray
    """Sorted uint64 hashes of text and class, one for each class of a text; see `of_class`."""
    shared_query: np.ndarray
    """(S,) int64, sorted: `normalised_hash` of a query of several rows, repeated for each of its
    positives; only queries with at most `MOST_SHARED`."""
    shared_document: np.ndarray
    """(S,) int64 hash of a positive of that query."""
    vague_query: np.ndarray
    """int64, sorted: `normalised_hash` of the queries with more positives than `MOST_SHARED`."""

    @property
    def num_documents(self) -> int:
        """Number N of documents in the corpus."""
        return int(self.starts[-1])

    def shards(
        self, vectors: Vectors, first: int = 0, stop: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yield the float16 vectors of the documents with ids from `first` to before `stop`, part
        by part.
        """
        stop = self.num_documents if stop is None else min(stop, self.num_documents)
        for number, part in enumerate(self.files.parts):
            start, end = self.starts[number : number + 2].tolist()
            if max(first, start) >= min(stop, end):
                continue
            keep = self._kept(number)
            found = vectors.documents(part)
            found = found if keep.all() else found[keep]
            yield found[max(first - start, 0) : stop - start]

    def vectors_of(
        self, vectors: Vectors, documents: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (n, D) float16 vectors of documents part by part, with their positions among the
        given sorted ids. Only parts with requested ids are read.
        """
        for number, inside in self._by_part(documents):
            places = np.flatnonzero(self._kept(number))[inside]
            start = int(np.searchsorted(documents, self.starts[number]))
            found = vectors.documents(self.files.parts[number])
            yield slice(start, start + len(inside)), found[places]

    def texts_of(self, documents: Collection[int]) -> dict[int, str]:
        """Read the texts of documents by id; parts without any of these ids are not read."""
        texts: dict[int, str] = {}
        wanted = np.array(sorted(documents), dtype=np.int64)
        for number, inside in self._by_part(wanted):
            places = np.flatnonzero(self._kept(number))[inside]
            found = self._read_texts(number, places)
            texts.update(zip((inside + self.starts[number]).tolist(), found, strict=True))
        return texts

    def ids_of(self, text_hash: np.ndarray) -> np.ndarray:
        """(n,) int64 document ids, given text hashes that must all be in the corpus."""
        return np.asarray(self.by_hash[np.searchsorted(self.sorted_hash, text_hash)], np.int64)

    def of_class(self, text_hash: np.ndarray, label_hash: np.ndarray) -> np.ndarray:
        """Bool mask of the texts that have the given class, element by element."""
        return among(self.classes, pair_hash(text_hash, label_hash))

    def shares(self, query_hash: np.ndarray) -> np.ndarray:
        """(n,) bool mask of queries that occur in several rows, so that these rows share their
        positives.
        """
        return among(self.shared_query, query_hash)

    def is_vague(self, query_hash: np.ndarray) -> np.ndarray:
        """(n,) bool mask of queries that occur in several rows, with more than `MOST_SHARED`
        positives in all.
        """
        return among(self.vague_query, query_hash)

    def positives_of(self, query_hash: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positives of shared queries, as pairs of an index into `query_hash` and a
        document id.
        """
        first = np.searchsorted(self.shared_query, query_hash, "left")
        count = np.searchsorted(self.shared_query, query_hash, "right") - first
        of = np.repeat(np.arange(len(query_hash)), count)
        within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        return of, self.shared_document[first[of] + within]

    def _by_part(self, documents: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each part that has any of the sorted ids, with these ids counted from the part's
        first one.
        """
        edges = np.searchsorted(documents, self.starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            inside = documents[edges[number] : edges[number + 1]]
            yield number, inside - self.starts[number]

    def _kept(self, number: int) -> np.ndarray:
        """(M,) bool mask of the part's distinct texts that are documents of the corpus."""
        return np.asarray(self.keep[self.first_text[number] : self.first_text[number + 1]])

    def _read_texts(self, number: int, places: np.ndarray) -> list[str]:
        part = self.files.parts[number]
        if number >= len(self.files.records):
            column = _read_column(part, "text")
        else:
            column = pc.list_flatten(_read_column(part, "positives"))
            # Places count distinct texts; where each comes first among all of them:
            places = np.unique(self.files.index.texts(part).place, return_index=True)[1][places]
        return list(column.take(pa.array(places)).to_pylist())


@lru_cache(maxsize=1)
def open_corpus(files: CorpusFiles) -> CorpusIndex:
    """Load the corpus metadata once for each process; the metadata of a large corpus are
    memory-mapped.

    Raises:
        PlacementError: this machine has not the memory that they take while they are made.
    """
    documents = sum(part.rows for part in files.parts)
    if documents < _MAPPED_DOCUMENTS:
        return CorpusIndex(files, **_metadata(files))
    named = [files.index.folder, *(part.digest for part in files.parts), str(len(files.records))]
    named += [file_name(files.excluded)] if files.excluded else []
    digest = xxhash.xxh3_128_hexdigest("\0".join(named).encode())

    def fill(folder: Path) -> None:
        needed, free = _BYTES_OF_A_DOCUMENT * documents, free_memory("cpu")
        if free < needed:
            raise PlacementError(
                f"the mining index of {documents:,} documents takes {needed / 2**30:.1f} GiB of "
                "memory while it is built, once on each machine, but this machine has "
                f"{free / 2**30:.1f} GiB free; mine on machines with more memory, or over fewer "
                "documents (mining.pool, mining.corpus)"
            )
        for name, array in _metadata(files).items():
            save_array(str(folder / f"{name}.npy"), array)

    entry = cache_folder() / "mining" / f"corpus-{CODE_VERSION}-{digest}"
    folder = filled(entry, fill)
    mark_used(entry)
    remove_unused(entry.parent, UNUSED_SECONDS, keep=entry)
    names = [field.name for field in fields(CorpusIndex) if field.name != "files"]
    return CorpusIndex(files, **{name: map_array(folder / f"{name}.npy") for name in names})


def _metadata(files: CorpusFiles) -> dict[str, np.ndarray]:
    """Compute the arrays of `CorpusIndex`, with a memory peak of about 68 bytes a document."""
    asked, several = _queries(files.records)
    hashes, counts, classes = [], [], [np.empty(0, np.uint64)]
    pairs = [np.empty((2, 0), np.int64)]
    first_row = 0
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        for part, known in zip(files.parts, _in_turn(pool, files), strict=True):
            hashes.append(known.text_hash)
            counts.append(len(known.text_hash))
            classes.append(pair_hash(known.label_of, known.label_hash))
            if first_row < len(asked):  # parts of further documents come after, and have no rows
                of = np.repeat(asked[first_row : first_row + part.rows], np.diff(known.first))
                chosen = among(several, of)
                pairs.append(np.stack([of[chosen], known.text_hash[known.place[chosen]]]))
                first_row += part.rows
    del asked, several
    every = np.concatenate([np.empty(0, np.int64), *hashes])
    hashes.clear()
    keep = np.zeros(len(every), dtype=bool)
    for _, places in _by_range(every):
        keep[places[np.unique(every[places], return_index=True)[1]]] = True
    first_text = np.cumsum([0, *counts])
    if files.excluded:
        excluded = load_array(files.excluded)
        for first, stop in pairwise(first_text[len(files.records) :].tolist()):
            keep[first:stop] &= ~among(excluded, every[first:stop])
    text_hash = every[keep]
    del every
    count = len(text_hash)
    sorted_hash = np.empty(count, np.int64)
    by_hash = np.empty(count, np.int32 if count < 2**31 else np.int64)
    for first, places in _by_range(text_hash):
        order = places[np.argsort(text_hash[places])]
        by_hash[first : first + len(order)] = order
        sorted_hash[first : first + len(order)] = text_hash[order]
    query, document, vague = _shared(np.concatenate(pairs, axis=1))
    kept = [int(keep[first:stop].sum()) for first, stop in pairwise(first_text.tolist())]
    return {
        "keep": keep,
        "first_text": first_text,
        "starts": np.cumsum([0, *kept]),
        "text_hash": text_hash,
        "sorted_hash": sorted_hash,
        "by_hash": by_hash,
        "classes": np.unique(np.concatenate(classes)),
        "shared_query": query,
        "shared_document": by_hash[np.searchsorted(sorted_hash, document)].astype(np.int64),
        "vague_query": vague,
    }


def _in_turn(pool: ThreadPoolExecutor, files: CorpusFiles) -> Iterator[PartTexts]:
    """Yield the text indexes of all Parquet parts in order, reading several files at a time."""
    for first in range(0, len(files.parts), _READ_AT_ONCE):
        yield from pool.map(files.index.texts, files.parts[first : first + _READ_AT_ONCE])


def _queries(parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Return the int64 `normalised_hash` of every row's query, and the sorted hashes that occur in
    several rows.
    """
    asked, first = read_column(parts, "query_hash"), 0
    for part in parts:
        texts = read_table(part.path, ["query"])["query"]
        of_part = asked[first : first + part.rows]  # equal texts are normalised once
        _, places, same = np.unique(of_part, return_index=True, return_inverse=True)
        keys = map(normalised_hash, texts.take(pa.array(places)).to_pylist())
        of_part[:] = np.array(list(keys), dtype=np.int64)[same]
        first += part.rows
    ordered = np.sort(asked)
    return asked, np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _by_range(hashes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Divide hashes into ascending ranges; yield the positions of each range's hashes, and the
    count of smaller ones. Sorting range by range needs little additional memory.
    """
    ranges = max(len(hashes) // _RANGE_DOCUMENTS, 1)
    edges = [-(2**63) + number * 2**64 // ranges for number in range(ranges)]
    first = 0
    for low, end in zip(edges, [*edges[1:], 2**63], strict=True):
        inside = hashes >= low
        inside &= hashes <= end - 1
        places = np.flatnonzero(inside)
        yield first, places
        first += len(places)


def _read_column(part: Part, name: str) -> pa.ChunkedArray:
    def read(path: str) -> pa.ChunkedArray:
        return read_table(path, [name])[name]

    column: pa.ChunkedArray = read_copied(part.path, read)
    return column


def among(wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Bool mask of the values that the sorted array `wanted` contains."""
    if not len(wanted):
        return np.zeros(values.shape, dtype=bool)
    places = np.searchsorted(wanted, values).clip(max=len(wanted) - 1)
    return np.asarray(wanted[places] == values)


def pair_hash(text_hash: np.ndarray, other: np.ndarray) -> np.ndarray:
    """uint64 hash of a text hash combined with another int64, such as a class hash."""
    return mixed(text_hash.view(np.uint64) ^ mixed(other))


def _shared(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sorted pairs of a shared query and a positive, and the queries left out for having
    too many positives.

    Args:
        pairs: (2, n) int64 hashes of such queries and of their positives, with repetition.
    """
    query, document = np.unique(pairs, axis=1)
    found, count = np.unique(query, return_counts=True)
    vague = found[count > MOST_SHARED]
    kept = ~among(vague, query)
    return query[kept], document[kept], vague

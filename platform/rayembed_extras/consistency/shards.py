"""Divide rows into shards of one language each, within which the consistency filter ranks
documents.

A row belongs to a shard of its language by a hash of the seed and its id. So a shard holds the same
rows however these are spread over parts, and about as many as the settings ask for: the count
varies by its square root, 0.1 % of a million.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.data.engine.exchange import Buckets, Sent, vectors_column, vectors_of
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import PartItem, read_table
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import seeded_keys
from rayembed.data.vectors.embed import Vectors

Language = str | None

NOT_THERE = -1


@dataclass(frozen=True)
class Shards:
    """Number of shards of each language; shard numbers run through all languages."""

    of: Mapping[Language, int]
    seed: int

    @classmethod
    def for_rows(cls, rows: Mapping[Language, int], shard_rows: int, seed: int) -> "Shards":
        """Plan shards of about `shard_rows` rows each; rows without a language come first."""
        ordered = sorted(rows, key=lambda language: (language is not None, language or ""))
        return cls({language: math.ceil(rows[language] / shard_rows) for language in ordered}, seed)

    @property
    def languages(self) -> list[Language]:
        """Language of each shard, by shard number."""
        return [language for language, count in self.of.items() for _ in range(count)]

    def numbers(self, id_hash: np.ndarray, languages: Sequence[Language]) -> np.ndarray:
        """(n,) int64 shard number of each row."""
        firsts = dict(zip(self.of, np.cumsum([0, *self.of.values()])[:-1].tolist(), strict=True))
        first = np.array([firsts[language] for language in languages], dtype=np.int64)
        count = np.array([self.of[language] for language in languages], dtype=np.uint64)
        place = seeded_keys(id_hash, self.seed, "consistency") % count
        return first + place.astype(np.int64)


@dataclass(frozen=True)
class CountLanguages:
    """Task that counts the rows of each language in a data file."""

    def __call__(self, item: PartItem) -> Result:
        """Run the task; its result has `languages` as [language, rows] pairs."""
        counts = read_table(item.part.path, ["language"])["language"].value_counts().to_pylist()
        rows = item.part.rows
        found = [[count["values"], count["counts"]] for count in counts]
        return {"rows_in": rows, "rows_out": rows, "rejected": {}, "languages": found}


@dataclass(frozen=True)
class NumberedPart(PartItem):
    """Work item: a data file and its index among all files."""

    number: int


_DOCUMENT = -1
"""Row index that marks a document: a text that is a positive of some row of the part."""


@dataclass(frozen=True)
class SendVectors:
    """Task that sends the vectors of a data file's queries and documents to the shards of their
    rows.
    """

    vectors: Vectors
    shards: Shards

    def __call__(self, item: NumberedPart) -> Sent:
        """Return the rows to send, queries before documents, with counts of rows and `positives` in
        the file.
        """
        part = item.part
        languages = read_table(part.path, ["language"])["language"].to_pylist()
        shard = self.shards.numbers(read_column([part], "id_hash"), languages)
        texts = self.vectors.texts(part)
        # A document goes to every shard that has a row with it, once.
        row = np.repeat(np.arange(part.rows), np.diff(texts.first))
        pairs = np.unique(np.stack([shard[row], texts.place]), axis=1)
        rows, documents = part.rows, pairs.shape[1]
        # Lists of the documents are empty: they end where the queries' do.
        first = np.concatenate([texts.first, np.full(documents, texts.first[-1])])
        queries = self.vectors.queries(part)
        vectors = np.concatenate([queries, self.vectors.documents(part)[pairs[1]]])
        hashes = [read_column([part], "query_hash"), texts.text_hash[pairs[1]]]
        table = pa.table(
            {
                "part": np.full(rows + documents, item.number, np.int32),
                "row": np.concatenate([np.arange(rows), np.full(documents, _DOCUMENT)]),
                "text": np.concatenate([texts.first[:-1], np.full(documents, _DOCUMENT)]),
                "text_hash": np.concatenate(hashes),
                "positives": pa.ListArray.from_arrays(
                    pa.array(first.astype(np.int32)), pa.array(texts.text_hash[texts.place])
                ),
                "vector": vectors_column(vectors),
            }
        )
        counts = {"rows_in": rows, "rows_out": rows, "rejected": {}, "positives": len(texts.place)}
        return Sent(table, np.concatenate([shard, pairs[0]]), counts)


@dataclass(frozen=True)
class RowShard:
    """The n rows of a shard, and the N distinct documents among which their queries search."""

    part: np.ndarray
    """(n,) int64 part number of each row."""
    row: np.ndarray
    """(n,) int64 row number within its part."""
    text: np.ndarray
    """(n,) int64 number of each row's first positive among all positives of its part's rows."""
    queries: np.ndarray
    """(n, D) float16 unit vectors."""
    first: np.ndarray
    """(n + 1,) int64: row i has the positives `place[first[i]:first[i + 1]]`."""
    place: np.ndarray
    """int64 document numbers of each row's positives, in their order."""
    documents: np.ndarray
    """(N, D) float16 unit vectors, each text once."""
    itself: np.ndarray
    """(n,) int64 index of the document equal to the query's text; `NOT_THERE` if there is no such
    document."""


def gather(buckets: Buckets, number: int) -> RowShard | None:
    """Assemble a shard from the rows and vectors sent to it; None if nothing was sent.

    Raises:
        ArtifactError: a file is missing or broken.
    """
    sent = buckets.read(number)
    if not sent:
        return None
    is_row = [table["row"].to_numpy() != _DOCUMENT for table in sent]
    rows = [table.filter(pa.array(mask)) for table, mask in zip(sent, is_row, strict=True)]
    known = [table.filter(pa.array(~mask)) for table, mask in zip(sent, is_row, strict=True)]
    counts = np.concatenate([pc.list_value_length(t["positives"]).to_numpy() for t in rows])
    positives = np.concatenate([pc.list_flatten(t["positives"]).to_numpy() for t in rows])
    # Of equal texts the vector that comes first; vectors are copied once, they are what is large.
    every = np.concatenate([table["text_hash"].to_numpy() for table in known])
    hashes, firsts = np.unique(every, return_index=True)
    kept = np.sort(firsts)
    edges = np.cumsum([0, *(len(table) for table in known)])
    chosen = np.split(kept, np.searchsorted(kept, edges[1:-1]))
    asked = np.concatenate([table["text_hash"].to_numpy() for table in rows])
    nearest = np.minimum(np.searchsorted(hashes, asked), len(hashes) - 1)
    place_of = np.searchsorted(kept, firsts)
    documents = [
        vectors_of(table["vector"])[places - edge]
        for table, places, edge in zip(known, chosen, edges[:-1], strict=True)
    ]
    return RowShard(
        part=np.concatenate([table["part"].to_numpy() for table in rows]).astype(np.int64),
        row=np.concatenate([table["row"].to_numpy() for table in rows]).astype(np.int64),
        text=np.concatenate([table["text"].to_numpy() for table in rows]).astype(np.int64),
        queries=np.concatenate([vectors_of(table["vector"]) for table in rows]),
        first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        place=place_of[np.searchsorted(hashes, positives)],
        documents=np.concatenate(documents),
        itself=np.where(hashes[nearest] == asked, place_of[nearest], NOT_THERE),
    )

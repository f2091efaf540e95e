"""Search one table of an index by vectors, or by vectors and words, and return rows with texts."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.errors import ConfigError
from rayembed.registry.indexes import Hit, IndexSearch
from rayembed_extras.indexing.manifest import TableRecord
from rayembed_extras.indexing.store import VectorStore

RANK_CONSTANT = 60
"""Constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)."""

FUSED_DEPTH = 100
"""Results of each search that are fused, where not more are asked for."""

WordSearch = Callable[[str, int], list[str]]
"""Function from a query and k to the ids of at most k rows with its words, best first."""


def fuse(rankings: Iterable[Sequence[str]], k: int) -> list[tuple[str, float]]:
    """Fuse rankings by Σ 1 / (60 + rank); return the k best ids with their sums, of equal ones the
    lesser id first.
    """
    sums: dict[str, float] = {}
    for ranking in rankings:
        for rank, name in enumerate(ranking, start=1):
            sums[name] = sums.get(name, 0.0) + 1 / (RANK_CONSTANT + rank)
    return sorted(sums.items(), key=lambda entry: (-entry[1], entry[0]))[:k]


@dataclass(frozen=True)
class WordIndex:
    """BM25 over a table's texts in memory: lower-case words, English stop words left out."""

    ids: np.ndarray
    """(N,) ids."""
    index: Any
    """bm25s's index; None: no text has a word."""

    def __call__(self, query: str, k: int) -> list[str]:
        """Return the ids of at most k rows that share a word with the query, best first."""
        if self.index is None:
            return []
        from rayembed.search.bm25_library import bm25s

        (words,) = bm25s.tokenize([query], stopwords="en", return_ids=False, show_progress=False)
        known = [word for word in words if word in self.index.vocab_dict]
        if not known:
            return []
        scores = self.index.get_scores(known)
        # All rows that tie for the last places, so that the order of the table decides nothing.
        least = 0.0
        if len(scores) > k:
            least = float(np.partition(scores, len(scores) - k)[len(scores) - k])
        rows = np.flatnonzero((scores > 0) & (scores >= least))
        ranked = sorted((-float(scores[row]), str(self.ids[row])) for row in rows)
        return [name for _, name in ranked[:k]]


def word_index(store: VectorStore, table: str) -> WordIndex:
    """Read the texts of a table, and build their index."""
    from rayembed.search.bm25_library import bm25s

    ids: list[str] = []
    texts: list[str] = []
    for rows in store.scan(table, ["id", "text"]):
        ids += rows["id"].to_pylist()
        texts += [text or "" for text in rows["text"].to_pylist()]
    words = bm25s.tokenize(texts, stopwords="en", show_progress=False)
    index = None
    if words.vocab:
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        index.index(words, show_progress=False)
    return WordIndex(np.array(ids, dtype=object), index)


class TableSearch:
    """Search in one table as its record describes it; calls from several threads are safe.

    Stores need not take several calls at once, so that one call waits for the other.
    """

    def __init__(self, store: VectorStore, record: TableRecord, *, bm25_rows: int) -> None:
        """Open a search; nothing is read.

        Args:
            bm25_rows: maximum rows over which an index of words is built in memory.
        """
        self._store, self._record, self._bm25_rows = store, record, bm25_rows
        self._words: WordSearch | None = None
        self._lock = threading.Lock()

    def no_hybrid(self) -> str:
        """Reason why the table cannot be searched for words; empty if it can."""
        record = self._record
        if not record.documents.get("store_text", True):
            return (
                f"the store keeps no texts of {record.table}; search dense, or build the index "
                "with documents.store_text=true"
            )
        if record.rows <= self._bm25_rows or self._words is not None:
            return ""
        with self._lock:
            if self._own_words() is not None:
                return ""
        return (
            f"{record.table} has {record.rows:,} rows, and BM25 is built in memory for at most "
            f"{self._bm25_rows:,} (limits.bm25_rows); search dense, raise the limit, or give a "
            "LanceDB table a full-text index: table.create_index('text', "
            "config=lancedb.index.FTS())"
        )

    def _own_words(self) -> WordSearch | None:
        """Full-text search of the store itself; None: it has none, or none for this table."""
        search = getattr(self._store, "word_search", None)
        found: WordSearch | None = None if search is None else search(self._record.table)
        return found

    def search(self, wanted: IndexSearch) -> list[list[Hit]]:
        """Return the k best rows of each query; see `rayembed.registry.indexes.NamedIndex`.

        Raises:
            ConfigError: hybrid search of a table that cannot be searched for words.
            RayembedError: the store does not answer.
        """
        table, (vectors, texts, k, mode) = self._record.table, wanted
        if mode == "hybrid" and (reason := self.no_hybrid()):
            raise ConfigError(reason)
        with self._lock:
            if mode == "hybrid" and self._words is None:
                self._words = self._own_words() or word_index(self._store, table)
            depth = k if mode == "dense" else max(k, FUSED_DEPTH)
            found = self._store.search(table, vectors, depth)
            ranked = [
                [(name, float(score)) for name, score in zip(ids, scores, strict=False)]
                for ids, scores in zip(found.ids, found.scores, strict=True)
            ]
            ranked = [[(name, score) for name, score in one if name] for one in ranked]
            if mode == "hybrid" and self._words is not None:
                words = [self._words(text, depth) for text in texts]
                ranked = [
                    fuse([[name for name, _ in near], with_words], k)
                    for near, with_words in zip(ranked, words, strict=True)
                ]
            rows = self._rows(sorted({name for one in ranked for name, _ in one}))
        return [[_hit(rows[name], score) for name, score in one if name in rows] for one in ranked]

    def _rows(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        record = self._record
        text = ["text"] if record.documents.get("store_text", True) else []
        columns = ["id", "document", "chunk", *text, *record.metadata]
        found = self._store.fetch(record.table, ids, columns)
        return {row["id"]: row for row in found.to_pylist()}


def _hit(row: dict[str, Any], score: float) -> Hit:
    rest = dict(row)
    name, document, chunk = (rest.pop(key) for key in ("id", "document", "chunk"))
    return Hit(name, score, document, chunk, rest.pop("text", None), rest)

"""BM25 as a baseline model for retrieval tasks."""

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from mteb.models import ModelMeta

from rayembed.data.words import search_words
from rayembed.evaluation.model_spec import SCORES, model_meta
from rayembed.evaluation.pooled.model import all_documents, query_texts
from rayembed.results.costs import Cost
from rayembed.search.bm25_library import bm25s

_CODE_VERSION = 3
"""Number of the splitting into words (`search_words`), in the revision of results."""


def bm25_meta(name: str, revision: str) -> ModelMeta:
    """Metadata of the BM25 baseline for mteb."""
    return model_meta(name, revision, model_type=["sparse"], framework=[], n_parameters=0)


def bm25_revision() -> str:
    """Revision under which BM25 results are stored."""
    return f"{Bm25.revision}-{SCORES}"


class Bm25:
    """Implements mteb's `SearchProtocol`: Lucene's BM25 over lower-case words, English stop words
    left out, no stemming (k1 = 1.5, b = 0.75).

    Of scripts without spaces between words, characters and pairs of them are words.
    """

    revision = f"bm25s-{version('bm25s')}-words{_CODE_VERSION}"

    def __init__(self, meta: ModelMeta | None = None) -> None:
        self.mteb_model_meta = meta or bm25_meta("bm25", self.revision)
        self._ids: list[str] = []
        self._index: Any = None
        self.cost = Cost()

    def index(self, corpus: Any, **_options: Any) -> None:
        """Index a corpus by the title and text of each document, as models embed them."""
        began = time.perf_counter()
        self._ids = list(corpus["id"])
        words = _words(list(all_documents(corpus)))
        self._index, size = None, 0
        if words.vocab:  # bm25s takes no corpus without a word
            self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
            self._index.index(words, show_progress=False)
            size = sum(array.nbytes for array in _arrays(self._index))
        seconds = time.perf_counter() - began
        self.cost += Cost(len(self._ids), seconds, size / max(1, len(self._ids)))

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, list[str]] | None = None,
        num_proc: int | None = None,
        **_options: Any,
    ) -> dict[str, dict[str, float]]:
        """Score the best documents of each query, by id; documents that share no word with the
        query are left out.
        """
        depth = len(self._ids) if top_ranked else min(top_k, len(self._ids))
        ids = list(queries["id"])
        if self._index is None:
            return {query: dict.fromkeys((top_ranked or {}).get(query, ()), 0.0) for query in ids}
        texts = query_texts(queries, task_metadata, num_proc)
        found, scores = self._index.retrieve(_words(texts), k=depth, show_progress=False)
        results: dict[str, dict[str, float]] = {}
        for query, rows, values in zip(ids, found, scores, strict=True):
            named = {self._ids[row]: float(value) for row, value in zip(rows, values, strict=True)}
            if top_ranked and query in top_ranked:
                results[query] = {document: named[document] for document in top_ranked[query]}
            else:
                results[query] = {document: score for document, score in named.items() if score > 0}
        return results


def _words(texts: list[str]) -> Any:
    vocabulary: dict[str, int] = {}
    ids = [
        [
            vocabulary.setdefault(word, len(vocabulary))
            for word in search_words(text)
            if word not in _STOP_WORDS
        ]
        for text in texts
    ]
    return bm25s.tokenization.Tokenized(ids, vocabulary)


_STOP_WORDS = frozenset(bm25s.stopwords.STOPWORDS_EN)


def _arrays(index: Any) -> list[np.ndarray]:
    """Arrays of the index that a search reads."""
    return [array for array in index.scores.values() if isinstance(array, np.ndarray)]

"""Find texts that equal an evaluation text or share most of its BM25 weight.

Let w(x, e) be the BM25 weight that the word x has in the evaluation text e, and |·| the number of
distinct words. The similarity of a training text t to e is

    Σ_{x in t and e} w(x, e) / Σ_{x in e} w(x, e) · min(1, |e| / |t|)

The first factor is the BM25 score of t for e relative to the score of e for itself, so it is 1 for
a copy whatever the length of e and the benchmark's size. Alone it would also be 1 for every long
document that happens to have the words of a short question. The second factor keeps those out: a
text may have at most 1 / `max_similarity` times as many words. It makes short evaluation texts
strict too: of three words none may be missing and none be added at 0.8. Texts of fewer words say
too little and count only when they are equal.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa
from scipy.sparse import csc_array, csr_array

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.data.engine.parts import remedy
from rayembed.data.hashes import text_hash
from rayembed.data.words import normalised, words
from rayembed.search.bm25_library import bm25s

FEWEST_WORDS = 3
"""Minimum number of distinct words of an evaluation text; shorter ones match equal texts only."""

_ROUNDING = 1e-5
"""Rounding tolerance of similarities, which are sums of float32 shares."""

_TEXTS_AT_ONCE = 1024
_PAIRS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Match:
    """Match of a training text: the index of the most similar evaluation text, and their
    similarity.
    """

    place: int
    similarity: float


@dataclass(frozen=True)
class Arrays:
    """BM25 weights of N evaluation texts over V distinct words, as sparse arrays (CSR)."""

    text_hash: np.ndarray
    """(N,) int64 of the normalised texts."""
    num_words: np.ndarray
    """(N,) int64 distinct words of a text; 0 for texts too short to compare by words."""
    vocabulary: np.ndarray
    """(V,) int64 hashes of the words, ascending."""
    data: np.ndarray
    """float32 BM25 weights, text by text, as shares of the text's total."""
    indices: np.ndarray
    """int32 word numbers of these weights."""
    indptr: np.ndarray
    """(N + 1,) int64 offset of each text."""


class EvaluationIndex:
    """Index of evaluation texts that finds the one most similar to a training text.

    Args:
        texts: columns `text` and `source`, N rows.
        max_similarity: what a match must exceed; None: only equal texts match.
    """

    def __init__(self, arrays: Arrays, texts: pa.Table, max_similarity: float | None) -> None:
        self.arrays, self.texts, self.max_similarity = arrays, texts, max_similarity
        self._exact = np.argsort(arrays.text_hash, kind="stable")
        shape = len(arrays.text_hash), len(arrays.vocabulary)
        self._weights = csr_array((arrays.data, arrays.indices, arrays.indptr), shape=shape)
        if max_similarity is not None:
            self._telling = telling_words(self._weights, max_similarity)

    def match(self, texts: Sequence[str]) -> list[Match | None]:
        """Return for each text an equal evaluation text, else the most similar one above
        `max_similarity`, else None.
        """
        found = self._equal(texts)
        if self.max_similarity is not None:
            rest = [i for i, match in enumerate(found) if match is None]
            for start in range(0, len(rest), _TEXTS_AT_ONCE):
                some = rest[start : start + _TEXTS_AT_ONCE]
                for i, match in self._similar([texts[i] for i in some], self.max_similarity):
                    found[some[i]] = match
        return found

    def _equal(self, texts: Sequence[str]) -> list[Match | None]:
        known = self.arrays.text_hash
        if not len(known):
            return [None] * len(texts)
        wanted = np.array([text_hash(normalised(text)) for text in texts], dtype=np.int64)
        places = np.searchsorted(known, wanted, sorter=self._exact)
        places = self._exact[np.minimum(places, len(known) - 1)]
        return [
            Match(int(place), 1.0) if same else None
            for place, same in zip(places, known[places] == wanted, strict=True)
        ]

    def _similar(self, texts: Sequence[str], above: float) -> Iterator[tuple[int, Match]]:
        """Yield the index of each text that is similar to an evaluation text, with its best
        match.
        """
        rows, places, similarity = self.similar_pairs(texts, above)
        found = zip(rows.tolist(), places.tolist(), similarity.tolist(), strict=True)
        for row, group in groupby(found, key=itemgetter(0)):
            _, place, value = next(group)
            yield row, Match(place, value)

    def similar_pairs(
        self, texts: Sequence[str], above: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find all pairs of a text and an evaluation text with a similarity above `above`; return
        their indices and similarities by text, most similar first. `above` must not be below
        `max_similarity`.
        """
        queries, lengths = self._queries(texts)
        # Pairs that share a telling word; no other pair can be similar enough.
        pairs = (queries @ self._telling).tocoo()
        rows, places = pairs.coords
        short = np.minimum(1.0, self.arrays.num_words[places] / lengths[rows])
        possible = short > above + _ROUNDING
        rows, places, short = rows[possible], places[possible], short[possible]
        similarity = np.empty(len(rows))
        for start in range(0, len(rows), _PAIRS_AT_ONCE):
            some = slice(start, start + _PAIRS_AT_ONCE)
            common = queries[rows[some]] * self._weights[places[some]]
            similarity[some] = common.sum(1) * short[some]
        order = np.lexsort((places, -similarity, rows))
        order = order[similarity[order] > above + _ROUNDING]
        return rows[order], places[order], similarity[order]

    def _queries(self, texts: Sequence[str]) -> tuple[csr_array, np.ndarray]:
        """(texts, V) sparse 0/1 matrix of the words in each text, and the number of distinct words
        of each text.
        """
        split = [list(dict.fromkeys(words(text))) for text in texts]
        lengths = np.array([len(found) for found in split])
        hashes = np.array([text_hash(word) for found in split for word in found], dtype=np.int64)
        vocabulary = self.arrays.vocabulary
        column = np.minimum(np.searchsorted(vocabulary, hashes), max(len(vocabulary) - 1, 0))
        known = vocabulary[column] == hashes if len(vocabulary) else np.zeros(len(hashes), bool)
        row = np.repeat(np.arange(len(texts)), lengths)[known]
        ones = np.ones(len(row), dtype=np.float32)
        shape = len(texts), len(vocabulary)
        return csr_array((ones, (row, column[known])), shape=shape), lengths


def telling_words(weights: csr_array, max_similarity: float) -> csr_array:
    """(V, N) sparse 0/1 matrix of each evaluation text's heaviest words; every sufficiently similar
    text contains at least one of them.

    These are the fewest words whose shares sum to 1 - `max_similarity` (the prefix filter of
    similarity joins): a text without any of them shares at most the rest. They are rare words, so
    few pairs have one in common.
    """
    text = np.repeat(np.arange(weights.shape[0]), np.diff(weights.indptr))
    order = np.lexsort((weights.indices, -weights.data, text))
    heaviest = weights.data[order].astype(np.float64)
    before = np.cumsum(heaviest) - heaviest
    first = weights.indptr[:-1][text]
    # Rounding may only make more words telling.
    telling = order[before - before[first] < 1 - max_similarity + _ROUNDING]
    ones = np.ones(len(telling), dtype=np.float32)
    shape = weights.shape[1], weights.shape[0]
    return csr_array((ones, (weights.indices[telling], text[telling])), shape=shape)


def build_arrays(texts: Iterable[str]) -> Arrays:
    """Compute the arrays of an index from its evaluation texts."""
    hashes, counts, ids = [], [], []
    vocabulary: dict[int, int] = {}
    for text in texts:
        found = [text_hash(word) for word in words(text)]
        distinct = len(set(found))
        hashes.append(text_hash(normalised(text)))
        counts.append(distinct if distinct >= FEWEST_WORDS else 0)
        ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in found])
    weights = csr_array((len(ids), len(vocabulary)), dtype=np.float32)
    if vocabulary:
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        # Plain names, since bm25s looks for an empty one.
        index.index((ids, {str(k): v for k, v in vocabulary.items()}), show_progress=False)
        found_ = index.scores
        shape = len(ids), len(vocabulary)
        weights = csc_array(
            (found_["data"], found_["indices"], found_["indptr"]), shape=shape
        ).tocsr()
    words_ = np.array(list(vocabulary), dtype=np.int64)
    order = np.argsort(words_)
    weights = csr_array(weights[:, order])
    sums = np.asarray(weights.sum(1)).reshape(-1)
    return Arrays(
        text_hash=np.array(hashes, dtype=np.int64),
        num_words=np.array(counts, dtype=np.int64),
        vocabulary=words_[order],
        data=(weights.data / np.repeat(sums, np.diff(weights.indptr))).astype(np.float32),
        indices=weights.indices.astype(np.int32),
        indptr=weights.indptr.astype(np.int64),
    )


def write_index(folder: str, sources: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Write the index of all evaluation texts into a folder, unless the folder has an index
    already.

    A text of several sources is assigned to the first.
    """
    if exists(_arrays_path(folder)):
        return
    named: dict[str, tuple[str, str]] = {}
    for name, texts in sources:
        for text in texts:
            named.setdefault(normalised(text), (text, name))
    named.pop("", None)
    table = pa.table(
        {
            "text": pa.array([text for text, _ in named.values()], pa.string()),
            "source": pa.array([name for _, name in named.values()], pa.string()),
        }
    )
    arrays = build_arrays(table["text"].to_pylist())
    write_atomic(_texts_path(folder), parquet_bytes(table))
    save_arrays(_arrays_path(folder), **vars(arrays))


def open_index(folder: str, max_similarity: float | None) -> EvaluationIndex:
    """Open an index written by `write_index`.

    Raises:
        ArtifactError: there is none, or it is broken.
    """
    advice = remedy(_arrays_path(folder))
    loaded = load_arrays(_arrays_path(folder), advice)
    arrays = Arrays(**{field.name: loaded[field.name] for field in fields(Arrays)})
    texts = read_sealed(_texts_path(folder), remedy=advice)
    return EvaluationIndex(arrays, texts, max_similarity)


def _arrays_path(folder: str) -> str:
    return join(folder, "index.npz")  # written last


def _texts_path(folder: str) -> str:
    return join(folder, "texts.parquet")

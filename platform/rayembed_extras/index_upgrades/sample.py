"""Draw the documents on which an upgrade is fitted and measured, from an index's store.

The store is read twice, in batches: ids first, then the rows of the drawn documents. Held in memory
are 8 bytes for each document, and the drawn rows.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.errors import DataError
from rayembed_extras.indexing.layout import loaded_vectors
from rayembed_extras.indexing.settings import NumberType
from rayembed_extras.indexing.store import VECTOR, Layout, VectorStore

_LEAST_DOCUMENTS = 50
"""Documents below which an index is too small to measure."""
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_LONGEST, _SHORTEST = 200, 12
"""Characters of a sentence that is taken as a query."""

Texts = Callable[[Collection[str]], Mapping[str, str]]
"""Function from ids of rows to their texts, for stores that keep none."""


@dataclass(frozen=True)
class TextSample:
    """Rows (texts with vectors) of drawn documents; R rows, N documents."""

    names: tuple[str, ...]
    """N document ids."""
    texts: tuple[str, ...]
    """R texts, as they were embedded."""
    owners: np.ndarray
    """(R,) int64 index of each row's document in `names`."""
    old: np.ndarray
    """(R, D_old) float32 vectors from the store, of length 1 up to its number type's rounding."""
    fits: np.ndarray
    """(N,) bool: documents on which maps are fitted."""
    searched: np.ndarray
    """(N,) bool: documents that are searched."""
    documents: int
    """Documents of the whole index."""
    rows: int
    """Rows of the whole index."""
    number_type: NumberType = "float32"
    """Number type of the stored vectors."""

    def rows_of(self, documents: np.ndarray) -> np.ndarray:
        """Indices of the rows that belong to documents of a mask (N,)."""
        found: np.ndarray = np.flatnonzero(documents[self.owners])
        return found


def draw_sample(
    store: VectorStore,
    table: str,
    layout: Layout,
    *,
    judged: Collection[str],
    searched: int,
    fits: int,
    seed: int,
    texts: Texts | None = None,
) -> TextSample:
    """Draw documents from a table: those that queries are judged on, a random sample to search, and
    others to fit maps on.

    If the index has no more than `searched` documents, all are searched, and maps are fitted on a
    random part of at most half, as they would be in use. Of a larger index the fitted documents are
    not searched: in use hardly any are.

    Args:
        judged: ids of judged documents.
        texts: gives the texts of rows if the store keeps none.

    Raises:
        DataError: a judged document is not in the index, or the index has too few documents.
    """
    hashes, rows = _document_hashes(store.scan(table, ["document"]), seed)
    if len(hashes) < _LEAST_DOCUMENTS:
        raise DataError(
            f"the index has {len(hashes)} documents, too few to measure an upgrade (at least "
            f"{_LEAST_DOCUMENTS}); embed them again: --road backfill"
        )
    whole = len(hashes) <= searched
    judged_hashes = np.array(sorted({_hash(name, seed) for name in judged}), np.uint64)
    others = hashes if whole else hashes[~np.isin(hashes, judged_hashes)]
    # Hashes are sorted, so the first ones are a random sample.
    fit = others[: min(fits, len(hashes) // 2)]
    rest = others if whole else others[len(fit) : len(fit) + max(0, searched - len(judged_hashes))]
    drawn = np.unique(np.concatenate([fit, rest, judged_hashes]))
    columns = ["id", "document", *(["text"] if texts is None else []), VECTOR]
    found: dict[str, list[tuple[str, str]]] = {}
    vectors: dict[str, list[np.ndarray]] = {}
    for batch in store.scan(table, columns):
        names = batch["document"].to_pylist()
        taken = np.flatnonzero(np.isin(_hashes(names, seed), drawn))
        if not len(taken):
            continue
        some = batch.take(pa.array(taken))
        floats = loaded_vectors(some[VECTOR], layout)
        ids = some["id"].to_pylist()
        given = some["text"].to_pylist() if texts is None else [""] * len(ids)
        for row, (name, key, text) in enumerate(
            zip(some["document"].to_pylist(), ids, given, strict=True)
        ):
            found.setdefault(name, []).append((key, text or ""))
            vectors.setdefault(name, []).append(floats[row])
    if missing := sorted(set(judged) - found.keys()):
        shown = ", ".join(map(repr, missing[:5]))
        raise DataError(
            f"{len(missing):,} of {len(set(judged)):,} judged documents are not in the index "
            f"({shown}); the queries belong to other documents, or the index is not current"
        )
    order = sorted(found, key=lambda name: (_hash(name, seed), name))
    if texts is not None:
        known = texts([key for name in order for key, _ in found[name]])
        found = {name: [(key, known[key]) for key, _ in found[name]] for name in order}
    numbers = _hashes(order, seed)
    return TextSample(
        tuple(order),
        tuple(text for name in order for _, text in found[name]),
        np.repeat(np.arange(len(order)), [len(found[name]) for name in order]),
        np.stack([vector for name in order for vector in vectors[name]]),
        np.isin(numbers, fit),
        np.isin(numbers, np.concatenate([rest, judged_hashes])),
        len(hashes),
        rows,
        layout.number_type,
    )


def first_sentence(text: str) -> str | None:
    """First sentence of a document, cut to 200 characters; None if it is too short for a query, or
    the whole text.
    """
    stripped = text.strip()
    sentence = next((part for part in _SENTENCE.split(stripped) if len(part) >= _SHORTEST), None)
    if sentence is None:
        return None
    if len(sentence) > _LONGEST:
        sentence = sentence[:_LONGEST].rsplit(" ", 1)[0]
    return sentence if len(sentence) < len(stripped) else None


def _document_hashes(batches: Iterable[pa.Table], seed: int) -> tuple[np.ndarray, int]:
    """Sorted distinct hashes of all documents, and the number of rows."""
    parts, rows = [np.empty(0, np.uint64)], 0
    for batch in batches:
        rows += len(batch)
        parts.append(np.unique(_hashes(batch["document"].to_pylist(), seed)))
        if len(parts) > 64:
            parts = [np.unique(np.concatenate(parts))]
    return np.unique(np.concatenate(parts)), rows


def _hash(name: str, seed: int) -> int:
    return int(xxhash.xxh3_64_intdigest(name.encode(), seed=seed))


def _hashes(names: Sequence[str], seed: int) -> np.ndarray:
    return np.fromiter((_hash(name, seed) for name in names), np.uint64, len(names))


def some_words(text: str) -> str | None:
    """Some 3 to 10 words of a text, in a row, drawn by its hash; None if it has no more."""
    words, drawn = text.split(), xxhash.xxh3_64_intdigest(text.encode())
    count = 3 + drawn % 8
    if len(words) <= count:
        return None
    start = drawn // 8 % (len(words) - count + 1)
    return " ".join(words[start : start + count])

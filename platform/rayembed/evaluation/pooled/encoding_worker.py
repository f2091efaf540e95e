"""Evaluation worker: embeds units of texts, and searches among their embeddings.

Only the best documents of each query leave a worker, never the embeddings of a corpus.

Q queries, N texts of a unit, D embedding width, k results.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from rayembed.errors import DataError
from rayembed.evaluation.model_spec import EmbedInContext, EmbedTexts, ModelSpec, Similarity
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore, TextUnit, hashes_of
from rayembed.machine.hardware import rounded_products
from rayembed.models.passes.encoding import random_documents
from rayembed.search.stored import best_by_bits, codes, pair_scores, score_of_code_product
from rayembed.search.tiles import Above, Best, best_documents, documents_above, tiles_of


class DrawnContext(NamedTuple):
    """Documents sampled from a corpus as the context of a contextual model, with their hash as
    name.
    """

    name: str
    """Hash of the documents, which `EncodeSpec.context` holds."""
    documents: list[str]


def draw_context(texts: Iterable[str], number: int, *, seed: int) -> DrawnContext:
    """Sample `number` distinct texts (all if there are fewer); the result depends only on the texts
    and the seed.
    """
    documents = random_documents(texts, number, seed=seed)
    return DrawnContext(xxhash.xxh3_128_hexdigest(packed(documents).tobytes()), documents)


def packed(documents: Sequence[str]) -> np.ndarray:
    """Serialise documents to one (bytes,) uint8 array, which workers can share."""
    return np.frombuffer(json.dumps(list(documents)).encode(), dtype=np.uint8)


def unpacked(array: np.ndarray) -> list[str]:
    """Deserialise documents from an array made by `packed`."""
    documents: list[str] = json.loads(array.tobytes())
    return documents


@dataclass(frozen=True)
class TopDocuments:
    """Request to a worker for the best documents of each query within a unit of texts."""

    unit: TextUnit
    k: int
    lowest: np.ndarray | None = None
    """(Q,) float32 score of each query below which documents may be left out; None: no limit."""


@dataclass(frozen=True)
class PairScores:
    """Request to a worker for the scores of given (query, document) pairs within a unit of
    texts.
    """

    unit: TextUnit
    query: np.ndarray
    """(P,) int32 rows of the queries."""
    document: np.ndarray
    """(P,) int32 indices of the documents in the unit."""


@dataclass(frozen=True)
class Found:
    """Result of a search in a unit of texts: one entry for each (query, document) pair, in any
    order.
    """

    query: np.ndarray
    """(R,) int32 rows of the queries."""
    document: np.ndarray
    """(R,) int32 places in the unit."""
    score: np.ndarray
    """(R,) float32."""
    again: np.ndarray | None = None
    """(R,) float32 scores of a second look, NaN of entries that get none; None: there is none."""
    embedded: int = 0
    """Texts of the unit that were embedded for it, not read from the store."""
    seconds: float = 0.0
    """Time that it took to embed them."""


class EncodingWorker:
    """Worker with a loaded model and the store of its embeddings."""

    def __init__(self, spec: ModelSpec, store: EmbeddingStore | None, device: str) -> None:
        self._embed_texts: EmbedTexts = spec.load(device)
        self._similarity: Similarity = spec.similarity
        self._stored = spec.stored
        self._store = store
        self.device = device
        """Name of the device that the model computes on."""
        self._embedded, self._seconds = 0, 0.0
        self._products = partial(rounded_products, spec.conditions.get("dtype", ""), device)

    def learn(self, name: str, context: np.ndarray | None) -> None:
        """Embed the documents of the named context for a contextual model; do nothing without a
        name.

        Args:
            context: what `packed` gives for them.
        """
        if name:
            assert context is not None
            assert isinstance(self._embed_texts, EmbedInContext)
            with self._products():
                self._embed_texts.learn(name, lambda: unpacked(context))

    def embed(self, unit: TextUnit) -> np.ndarray:
        """(N, D) embeddings of the unit's texts, in their order, stored or newly computed.

        Raises:
            DataError: the model gives numbers that are not finite.
        """
        hashes = hashes_of(unit.texts)
        keys = [row.tobytes() for row in hashes]
        known = self._store.read(unit.bucket, hashes) if self._store else {}
        missing = [place for place, key in enumerate(keys) if key not in known]
        if missing:
            texts = [unit.texts[place] for place in missing]
            began = time.perf_counter()
            with self._products():
                made = np.asarray(self._embed_texts(texts, unit.bucket.encode_spec))
            self._embedded += len(texts)
            self._seconds += time.perf_counter() - began
            made = _finite(texts, made)
            if self._store is not None:
                self._store.write(unit.bucket, hashes[missing], made)
                made = self._store.rounded(made)
            known |= {keys[place]: vector for place, vector in zip(missing, made, strict=True)}
        return np.stack([known[key] for key in keys]).astype(np.float32)

    def search(self, asked: TopDocuments | PairScores, queries: np.ndarray) -> Found:
        """Search the unit's documents for a request, and return scores by the model's
        similarity.

        Args:
            queries: (Q, D) as `comparable` gives them.
        """
        embedded, seconds = self._embedded, self._seconds
        documents = comparable(self.embed(asked.unit), self._similarity)
        if isinstance(asked, PairScores):
            found = Found(asked.query, asked.document, self._of_pairs(asked, queries, documents))
        elif self._stored.precision == "binary":
            found = self._best_by_bits(asked, queries, documents)
        else:
            found = self._best(asked, queries, documents)
        return replace(found, embedded=self._embedded - embedded, seconds=self._seconds - seconds)

    def _of_pairs(
        self, asked: PairScores, queries: np.ndarray, documents: np.ndarray
    ) -> np.ndarray:
        if self._stored.precision == "float32":
            found: np.ndarray = np.einsum(
                "pd,pd->p", queries[asked.query], documents[asked.document]
            )
            return found
        return pair_scores(queries, documents, asked.query, asked.document, self._stored)

    def _best_by_bits(
        self, asked: TopDocuments, queries: np.ndarray, documents: np.ndarray
    ) -> Found:
        rescore = self._stored.rescore
        found = best_by_bits(queries, documents, asked.k, rescore, asked.lowest)
        row, place = found.row.astype(np.int32), found.place.astype(np.int32)
        return Found(row, place, found.score, found.again)

    def _best(self, asked: TopDocuments, queries: np.ndarray, documents: np.ndarray) -> Found:
        factor = np.float32(1)
        if self._stored.precision == "int8":
            queries, documents = codes(queries), codes(documents)
            factor = np.float32(score_of_code_product(documents.shape[1]))
        right = torch.from_numpy(documents).to(self.device)
        # Copied: what Ray shares cannot be written, which torch wants to be able to.
        left = torch.tensor(queries, device=self.device)
        tiles = tiles_of(left.device, left.shape[1])
        found: Iterable[Best | Above]
        if asked.lowest is None:
            found = best_documents(left, right, asked.k, tiles)
        else:
            # Products of codes are whole numbers: what they were before the factor is known again.
            whole = np.rint(asked.lowest / factor) if factor != 1 else asked.lowest
            lowest = torch.tensor(whole, device=self.device)
            found = documents_above(left, right, lowest, tiles)
        rows, values, places = (
            [np.empty(0, np.int64)],
            [np.empty(0, np.float32)],
            [np.empty(0, np.int64)],
        )
        for row, value, place in found:
            spread = row if place.dim() == 1 else row[:, None].expand(place.shape)
            rows.append(spread.flatten().cpu().numpy())
            values.append(value.flatten().cpu().numpy())
            places.append(place.flatten().cpu().numpy())
        return Found(
            np.concatenate(rows).astype(np.int32),
            np.concatenate(places).astype(np.int32),
            np.concatenate(values) * factor,
        )


def comparable(vectors: np.ndarray, similarity: Similarity) -> np.ndarray:
    """Convert (N, D) vectors to float32 vectors whose inner products are the model's
    similarities.
    """
    exact = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    if similarity == "cosine":
        exact = torch.nn.functional.normalize(exact, dim=1)
    return exact.numpy()


def _finite(texts: list[str], vectors: np.ndarray) -> np.ndarray:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise DataError(
            f"the model gives vectors with NaN or infinity for {len(bad)} of {len(texts)} texts, "
            f"the first: {texts[bad[0]][:200]!r}; its weights are broken or overflow in this "
            "number type: try model.dtype=float32"
        )
    return vectors

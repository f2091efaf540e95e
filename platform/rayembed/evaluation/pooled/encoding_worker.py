"""A worker of the evaluation: embeds units of texts, and searches in what it embedded.

Only the best documents of each query leave a worker, never the embeddings of a corpus.

Q queries, N texts of a unit, D embedding width, k results.
"""

from dataclasses import dataclass

import numpy as np
import torch

from rayembed.errors import DataError
from rayembed.evaluation.context import unpacked
from rayembed.evaluation.model_spec import EmbedInContext, EmbedTexts, ModelSpec, Similarity
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore, TextUnit, hashes_of
from rayembed.search.order import best_columns

_SCORES = 1 << 26
"""Scores that are looked at together: 256 MiB in float32."""


@dataclass(frozen=True)
class TopK:
    """Asks for the best documents of each query."""

    unit: TextUnit
    k: int
    lowest: np.ndarray | None = None
    """(Q,) float32: what scores below can be left out; None: nothing."""


@dataclass(frozen=True)
class PairScores:
    """Asks for the scores of some queries with some documents."""

    unit: TextUnit
    query: np.ndarray
    """(P,) int32 rows of the queries."""
    document: np.ndarray
    """(P,) int32 places in the unit."""


@dataclass(frozen=True)
class Found:
    """Results of a search in a unit, one entry each, in any order."""

    query: np.ndarray
    """(R,) int32 rows of the queries."""
    document: np.ndarray
    """(R,) int32 places in the unit."""
    score: np.ndarray
    """(R,) float32."""


class EncodingWorker:
    """A loaded model with the store of its embeddings."""

    def __init__(self, spec: ModelSpec, store: EmbeddingStore | None, device: str) -> None:
        self._embed_texts: EmbedTexts = spec.load(device)
        self._similarity: Similarity = spec.similarity
        self._store = store
        self._device = device

    def learn(self, name: str, context: np.ndarray | None) -> None:
        """Take in the documents of the context of that name, unless there is none.

        Args:
            context: what `packed` gives for them.
        """
        if name:
            assert context is not None
            assert isinstance(self._embed_texts, EmbedInContext)
            self._embed_texts.learn(name, lambda: unpacked(context))

    def embed(self, unit: TextUnit) -> np.ndarray:
        """(N, D) embeddings of the unit's texts, in their order.

        Raises:
            DataError: the model gives numbers that are not finite.
        """
        hashes = hashes_of(unit.texts)
        keys = [row.tobytes() for row in hashes]
        known = self._store.read(unit.bucket, hashes) if self._store else {}
        missing = [place for place, key in enumerate(keys) if key not in known]
        if missing:
            texts = [unit.texts[place] for place in missing]
            made = _finite(texts, np.asarray(self._embed_texts(texts, unit.bucket.encode_spec)))
            if self._store is not None:
                self._store.write(unit.bucket, hashes[missing], made)
                made = self._store.rounded(made)
            known |= {keys[place]: vector for place, vector in zip(missing, made, strict=True)}
        return np.stack([known[key] for key in keys]).astype(np.float32)

    def search(self, asked: TopK | PairScores, queries: np.ndarray) -> Found:
        """Results of a request for the unit's documents, by the model's similarity.

        Args:
            queries: (Q, D) as `comparable` gives them.
        """
        documents = comparable(self.embed(asked.unit), self._similarity)
        if isinstance(asked, PairScores):
            score = np.einsum("pd,pd->p", queries[asked.query], documents[asked.document])
            return Found(asked.query, asked.document, score)
        return self._best(asked, queries, documents)

    def _best(self, asked: TopK, queries: np.ndarray, documents: np.ndarray) -> Found:
        tile = max(1, _SCORES // len(documents))
        right = torch.from_numpy(documents).to(self._device).T
        rows, places, values = [], [], []
        for start in range(0, len(queries), tile):
            # Copied: what Ray shares cannot be written, which torch wants to be able to.
            some = torch.tensor(queries[start : start + tile], device=self._device)
            scores = some @ right
            if asked.lowest is None:
                best, columns = best_columns(scores, asked.k)
                row = torch.arange(len(some))[:, None].expand(columns.shape).flatten()
                column, value = columns.flatten(), best.flatten()
            else:
                lowest = torch.tensor(asked.lowest[start : start + tile], device=self._device)
                row, column = torch.nonzero(scores >= lowest[:, None], as_tuple=True)
                value = scores[row, column]
            rows.append(row.cpu().numpy() + start)
            places.append(column.cpu().numpy())
            values.append(value.cpu().numpy())
        return Found(
            np.concatenate(rows).astype(np.int32),
            np.concatenate(places).astype(np.int32),
            np.concatenate(values),
        )


def comparable(vectors: np.ndarray, similarity: Similarity) -> np.ndarray:
    """(N, D) float32 whose inner products are the similarities of the (N, D) vectors."""
    exact = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    if similarity == "cosine":
        exact = torch.nn.functional.normalize(exact, dim=1)
    return exact.numpy()


def _finite(texts: list[str], vectors: np.ndarray) -> np.ndarray:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise DataError(
            f"the model gives vectors with NaN or infinity for {len(bad)} of {len(texts)} texts, "
            f"the first: {texts[bad[0]][:200]!r}; its weights are broken or overflow in this type: "
            "try model.dtype=float32"
        )
    return vectors

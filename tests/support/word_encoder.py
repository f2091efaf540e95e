"""An encoder for mteb that knows nothing but words: fast, and the same on every machine."""

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rayembed.evaluation.model_spec import model_meta


class WordEncoder:
    """Each word is a fixed random direction; a text is their sum, of length one."""

    def __init__(self, dim: int = 64) -> None:
        self.mteb_model_meta = model_meta("words", "1", embed_dim=dim, similarity_fn_name="cosine")
        self.dim = dim
        self.texts: list[str] = []
        """All that were encoded, in their order."""

    def encode(self, inputs: Any, **_options: Any) -> np.ndarray:
        """Vectors (N, D) float32 of all texts of a loader."""
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts += texts
        return word_vectors(texts, self.dim)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Cosines (N1, N2) of each with each; vectors have length one."""
        first, second = (torch.atleast_2d(torch.as_tensor(e)) for e in (embeddings1, embeddings2))
        return first @ second.T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Cosines (N,) of the vectors of one row each."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(dim=-1)


@lru_cache(maxsize=100_000)
def _direction(word: str, dim: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(dim)


def word_vectors(texts: Sequence[str], dim: int = 64) -> np.ndarray:
    """Vectors (N, D) float32 of length one."""
    vectors = np.zeros((len(texts), dim))
    for row, text in enumerate(texts):
        for word in re.findall(r"\w+", text.lower()) or [""]:
            vectors[row] += _direction(word, dim)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / lengths).astype(np.float32)

"""The context of a task's texts: documents drawn from its corpus (arXiv 2410.02525, section 10.12).

"For retrieval, this corresponds to the corpus itself (importantly, not the queries); for other
modalities, we choose the default text field."
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from rayembed.models.encoding import random_documents


class DrawnContext(NamedTuple):
    """Documents that stand for a corpus."""

    name: str
    """Hash of the documents, which `EncodeSpec.context` holds."""
    documents: list[str]


def draw_context(texts: Iterable[str], number: int, *, seed: int) -> DrawnContext:
    """Sample `number` distinct texts (all if fewer); depends only on the texts and the seed."""
    documents = random_documents(texts, number, seed=seed)
    return DrawnContext(xxhash.xxh3_128_hexdigest(packed(documents).tobytes()), documents)


def packed(documents: Sequence[str]) -> np.ndarray:
    """(bytes,) uint8 of the documents, an array that workers share."""
    return np.frombuffer(json.dumps(list(documents)).encode(), dtype=np.uint8)


def unpacked(array: np.ndarray) -> list[str]:
    """The documents that `packed` made an array of."""
    documents: list[str] = json.loads(array.tobytes())
    return documents

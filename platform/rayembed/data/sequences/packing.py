"""From the tokens of texts to sequences of at most a given length. Pure functions of arrays."""

from collections.abc import Sequence

import numpy as np

from rayembed.models.masked_language_tokens import Vocabulary


def packed(texts: Sequence[np.ndarray], vocabulary: Vocabulary, length: int) -> list[np.ndarray]:
    """Sequences that hold all tokens of the texts in their order; only the last may be shorter.

    Texts are parted by what the tokenizer puts behind one, and each sequence stands amid the
    tokenizer's own special tokens.

    Args:
        texts: (n,) int32 ids of each text, without special tokens.
        length: tokens of a sequence, special ones included.
    """
    if not texts:
        return []
    between = np.array(vocabulary.suffix, dtype=np.int32)
    stream = np.concatenate([part for text in texts for part in (between, text)][1:])
    room = room_of(vocabulary, length)
    return [framed(stream[a : a + room], vocabulary) for a in range(0, len(stream), room)]


def truncated(texts: Sequence[np.ndarray], vocabulary: Vocabulary, length: int) -> list[np.ndarray]:
    """A sequence of each text, cut at the end; arguments as of `packed`."""
    room = room_of(vocabulary, length)
    return [framed(text[:room], vocabulary) for text in texts]


def framed(ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """(T,) int32: the ids amid the tokenizer's own special tokens."""
    return np.concatenate([vocabulary.prefix, ids, vocabulary.suffix]).astype(np.int32)


def room_of(vocabulary: Vocabulary, length: int) -> int:
    """Tokens of texts that a sequence holds beside special ones."""
    return length - len(vocabulary.prefix) - len(vocabulary.suffix)

"""Packing of tokenised texts into sequences of bounded length. Pure functions of arrays."""

from collections.abc import Sequence

import numpy as np

from rayembed.models.vocabulary import Vocabulary


def packed(
    texts: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    length: int,
    before: np.ndarray | None = None,
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Full sequences of the texts' tokens in order, and the remaining tokens.

    Texts are separated by the tokenizer's closing special tokens, and each sequence is enclosed in
    its special tokens. The remainder, (r,) int32 without special tokens and shorter than a
    sequence, is passed to the next call; after the last text it forms a shorter sequence.

    Args:
        texts: (n,) int32 ids of each text, without special tokens.
        length: tokens of a sequence, special ones included.
        before: what the call before left; None: no text came before these.
    """
    if not texts:
        return [], before
    between = np.array(vocabulary.suffix, dtype=np.int32)
    parts = [part for text in texts for part in (between, text)]
    stream = np.concatenate(parts[1:] if before is None else [before, *parts])
    room = token_budget(vocabulary, length)
    full = len(stream) - len(stream) % room
    found = [with_special_tokens(stream[a : a + room], vocabulary) for a in range(0, full, room)]
    return found, stream[full:].copy()  # a view would keep the whole stream


def truncated(texts: Sequence[np.ndarray], vocabulary: Vocabulary, length: int) -> list[np.ndarray]:
    """One sequence for each text, truncated at the end; arguments as of `packed`."""
    room = token_budget(vocabulary, length)
    return [with_special_tokens(text[:room], vocabulary) for text in texts]


def with_special_tokens(ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """(T,) int32: the ids with the tokenizer's special tokens around them."""
    return np.concatenate([vocabulary.prefix, ids, vocabulary.suffix]).astype(np.int32)


def token_budget(vocabulary: Vocabulary, length: int) -> int:
    """Maximum number of text tokens in a sequence, besides special ones."""
    return length - len(vocabulary.prefix) - len(vocabulary.suffix)

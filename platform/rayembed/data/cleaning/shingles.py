"""Hashed word n-grams (shingles) for near-duplicate detection."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.data.hashes import mixed, text_hash
from rayembed.data.words import words

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Shingles:
    """Word n-grams of n texts, concatenated."""

    hashes: np.ndarray
    """uint64 hashes, text after text, in text order."""
    first: np.ndarray
    """(n + 1,) int64: text i has `hashes[first[i]:first[i + 1]]`, at least one."""

    def of(self, text: int) -> np.ndarray:
        """N-grams of one text."""
        return self.hashes[self.first[text] : self.first[text + 1]]


def shingles(texts: Sequence[str], ngram: int) -> Shingles:
    """All word n-grams of each text; a text with fewer words is a single n-gram."""
    known: dict[str, int] = {}
    split = [words(text) for text in texts]
    codes = [known.setdefault(word, len(known)) for found in split for word in found]
    by_code = np.array([text_hash(word) for word in known], dtype=np.int64).view(np.uint64)
    hashes = by_code[np.array(codes, dtype=np.int64)]
    counts = np.array([len(found) for found in split], dtype=np.int64)
    grams = np.maximum(counts - ngram + 1, 1)
    first = np.concatenate([[0], np.cumsum(grams)])
    start = np.cumsum(counts) - counts
    # The word in which each n-gram starts, and of how many words it is.
    begin = np.repeat(start - first[:-1], grams) + np.arange(first[-1])
    length = np.repeat(np.minimum(counts, ngram), grams)
    combined = np.zeros(len(begin), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for place in range(ngram):
            inside = place < length
            combined[inside] = combined[inside] * _FACTOR + hashes[begin[inside] + place]
    return Shingles(mixed(combined), first)

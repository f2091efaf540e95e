"""Benchmark texts within longer texts, found by common n-grams of words (GPT-3, arXiv 2005.14165,
appendix C).

Words are those of `words`: case, width, punctuation, white space and invisible characters do not
count, and in scripts without spaces a character is a word. A benchmark text of at least n words is
found in a text that has any n consecutive words of it; a shorter one, down to `shortest` words, in
a text that has all of its words one after the other. Even shorter ones are not looked for.

Kept in memory are hashes of the benchmark texts' n-grams only, with the number of a text that each
is from: 12 bytes, and two to four for a filter that most n-grams of other texts do not pass. Two
n-grams are taken for the same by 64-bit hashes: in 10 billion n-grams against a million one false
match is expected with a probability of 1 in 1,800.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import join
from rayembed.config.mining import Containment
from rayembed.data.cleaning.signatures import GRAM_FACTOR, hashed_words
from rayembed.data.engine.parts import remedy
from rayembed.data.hashes import mixed

_TEXTS_AT_ONCE = 1024
"""Texts whose words are hashed at a time, with some 100 bytes a word."""

_INVISIBLE = dict.fromkeys([0x00AD, 0x200B, 0x2060, 0xFEFF])
"""Characters that are left out: soft hyphen, zero-width space, word joiner, byte-order mark."""

_FILTER_BITS_PER_GRAM = 16
"""Bits of the filter for each n-gram, at least: one of 16 other n-grams passes at most."""


@dataclass(frozen=True)
class Grams:
    """N-grams of E benchmark texts, each once."""

    hashes: np.ndarray
    """(G,) uint64, ascending."""
    places: np.ndarray
    """(G,) int32 number of the first text that has it."""
    lengths: tuple[int, ...]
    """Numbers of words that n-grams have, ascending."""


def grams_of(texts: Sequence[str], settings: Containment) -> Grams:
    """N-grams by which benchmark texts are found."""
    found, places, seen = [np.empty(0, np.uint64)], [np.empty(0, np.int32)], set[int]()
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        hashes, counts = _hashed(texts[start : start + _TEXTS_AT_ONCE])
        taken = np.where(counts >= settings.shortest, np.minimum(counts, settings.ngram), 0)
        of_slice = [int(length) for length in np.unique(taken[taken > 0])]
        seen.update(of_slice)
        for length, grams, texts_of in _windows(hashes, counts, of_slice):
            ours = taken[texts_of] == length
            found.append(grams[ours])
            places.append((start + texts_of[ours]).astype(np.int32))
    lengths = tuple(sorted(seen))
    all_hashes, all_places = np.concatenate(found), np.concatenate(places)
    order = np.lexsort((all_places, all_hashes))
    distinct, first = np.unique(all_hashes[order], return_index=True)
    return Grams(distinct, all_places[order][first], lengths)


def write_grams(folder: str, texts: Sequence[str], settings: Containment) -> None:
    """Write the n-grams of benchmark texts."""
    grams = grams_of(texts, settings)
    save_arrays(
        _path(folder),
        hashes=grams.hashes,
        places=grams.places,
        lengths=np.array(grams.lengths, dtype=np.int64),
    )


def open_grams(folder: str) -> "GramIndex":
    """Open what `write_grams` wrote.

    Raises:
        ArtifactError: there is none, or it is broken.
    """
    loaded = load_arrays(_path(folder), remedy(_path(folder)))
    lengths = tuple(loaded["lengths"].tolist())
    return GramIndex(Grams(loaded["hashes"], loaded["places"], lengths))


def _path(folder: str) -> str:
    return join(folder, "grams.npz")


class GramIndex:
    """Finds for texts the benchmark text that each contains."""

    def __init__(self, grams: Grams) -> None:
        self.grams = grams
        bits = max(int(_FILTER_BITS_PER_GRAM * len(grams.hashes) - 1).bit_length(), 3)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << (bits - 3), dtype=np.uint8)
        slot = grams.hashes >> self._shift
        np.bitwise_or.at(self._filter, slot >> np.uint64(3), _bit(slot))

    def find(self, texts: Sequence[str]) -> np.ndarray:
        """(texts,) int64 number of a benchmark text within each, the lowest; -1 for none."""
        if not len(self.grams.hashes):
            return np.full(len(texts), -1, dtype=np.int64)
        slices = range(0, len(texts), _TEXTS_AT_ONCE)
        found = [self._find(texts[first : first + _TEXTS_AT_ONCE]) for first in slices]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _find(self, texts: Sequence[str]) -> np.ndarray:
        found = np.full(len(texts), -1, dtype=np.int64)
        hashes, counts = _hashed(texts)
        unset = np.iinfo(np.int64).max
        best = np.full(len(texts), unset)
        for _, grams, texts_of in _windows(hashes, counts, self.grams.lengths):
            slot = grams >> self._shift
            passing = np.flatnonzero(self._filter[slot >> np.uint64(3)] & _bit(slot))
            wanted = grams[passing]
            at = np.searchsorted(self.grams.hashes, wanted)
            at = np.minimum(at, len(self.grams.hashes) - 1)
            same = self.grams.hashes[at] == wanted
            np.minimum.at(best, texts_of[passing[same]], self.grams.places[at[same]])
        return np.where(best == unset, found, best)


def share_contained(text: str, benchmark_text: str, settings: Containment) -> float:
    """Share of a benchmark text's distinct n-grams that a text has."""
    wanted = grams_of([benchmark_text], settings)
    hashes, counts = _hashed([text])
    found = [grams for _, grams, _ in _windows(hashes, counts, wanted.lengths)]
    if not found:
        return 0.0
    return float(np.isin(wanted.hashes, np.concatenate(found)).mean())


def _hashed(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """As `hashed_words`, of words that invisible characters do not cut in two."""
    return hashed_words([text.translate(_INVISIBLE) for text in texts])


def _bit(slot: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint8(1), (slot & np.uint64(7)).astype(np.uint8))


def _windows(
    hashes: np.ndarray, counts: np.ndarray, lengths: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each length, the hashes of all n-grams that lie within a text, and the text of each.

    Args:
        hashes: (words,) uint64 of all texts' words.
        counts: (texts,) words of each text.
        lengths: words of an n-gram, ascending.
    """
    text = np.repeat(np.arange(len(counts)), counts)
    left = np.repeat(np.cumsum(counts), counts) - np.arange(len(hashes))
    combined, done = np.zeros(len(hashes), dtype=np.uint64), 0
    for length in lengths:
        with np.errstate(over="ignore"):
            for place in range(done, length):
                # What begins too near the end of all texts is cut away.
                there = max(len(hashes) - place, 0)
                combined = combined[:there] * GRAM_FACTOR + hashes[place:]
        done = length
        inside = left[: len(combined)] >= length
        yield length, mixed(combined[inside]), text[: len(combined)][inside]

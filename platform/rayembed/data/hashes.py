"""Hashes by which texts, queries and classes are compared; the same on all machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:  # settings of sources hash texts, and load no numpy
    import numpy as np

NO_HASH = 0
"""Placeholder in hash arrays for "no text" or "no label"; no text or label hashes to it."""


def text_hash(text: str) -> int:
    """Stable 64-bit hash of a text, never `NO_HASH`."""
    return xxhash.xxh3_64_intdigest(text.encode()) - 2**63 or 1


def label_hash(label: str | None) -> int:
    """64-bit hash of a class or language name; `NO_HASH` if there is no name."""
    return NO_HASH if label is None else text_hash(label)


def seeded_hash(seed: int, purpose: str, text: str) -> int:
    """64-bit hash of a seed, a purpose and a text, the same on every machine."""
    return xxhash.xxh3_64_intdigest(f"{seed}\0{purpose}\0{text}".encode())


def seeded_keys(hashes: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """(n,) uint64 pseudo-random sort keys of rows, from their hashes, a seed and a purpose.

    A row's key depends on its hash, the seed and the purpose, and not on the other rows. Different
    hashes have different keys.

    Args:
        hashes: (n,) int64.
    """
    import numpy as np

    salt = np.uint64(xxhash.xxh3_64_intdigest(f"{seed}\0{purpose}".encode()))
    return mixed(np.ascontiguousarray(hashes, dtype=np.int64).view(np.uint64) ^ salt)


def nth_smallest(keys: Callable[[], Iterable[np.ndarray]], n: int) -> int:
    """Find the n-th smallest key, counted from 1, without holding all keys in memory.

    Args:
        keys: gives (some,) uint64 keys after each other; called twice.
    """
    import numpy as np

    shift = np.uint64(48)
    counts = np.zeros(1 << 16, np.int64)
    for some in keys():
        counts += np.bincount((some >> shift).astype(np.int64), minlength=len(counts))
    ends = counts.cumsum()
    high = int(np.searchsorted(ends, n))
    near = np.concatenate([some[some >> shift == high] for some in keys()])
    place = n - 1 - int(ends[high] - counts[high])
    return int(np.partition(near, place)[place])


def mixed(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers by the finalizer of SplitMix64, a bijection; returns uint64.

    One changed input bit changes half of the output bits, so that sorting by the output is a
    shuffle.
    """
    import numpy as np

    bits = values.view(np.uint64)
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))

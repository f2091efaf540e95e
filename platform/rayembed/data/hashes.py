"""Hashes by which texts, queries and classes are compared; equal on all machines."""

import numpy as np
import xxhash

NO_HASH = 0
"""Stands in hash arrays for "there is none"; no text or label has it."""


def text_hash(text: str) -> int:
    """Stable 64-bit hash of a text, never `NO_HASH`."""
    return xxhash.xxh3_64_intdigest(text.encode()) - 2**63 or 1


def label_hash(label: str | None) -> int:
    """Hash of a class or a language; `NO_HASH` for none."""
    return NO_HASH if label is None else text_hash(label)


def seeded_keys(hashes: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """(n,) uint64 by which rows with these hashes are put in a random order.

    A row's key depends on its hash, the seed and the purpose, and not on the other rows. Different
    hashes have different keys: SplitMix64's finalizer mixes 64 bits one to one.

    Args:
        hashes: (n,) int64.
    """
    salt = np.uint64(xxhash.xxh3_64_intdigest(f"{seed}\0{purpose}".encode()))
    keys = np.ascontiguousarray(hashes, dtype=np.int64).view(np.uint64) ^ salt
    with np.errstate(over="ignore"):
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(keys ^ (keys >> np.uint64(31)))

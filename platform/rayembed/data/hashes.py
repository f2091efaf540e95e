"""Hashes by which texts, queries and classes are compared; equal on all machines."""

import xxhash

NO_HASH = 0
"""Stands in hash arrays for "there is none"; no text or label has it."""


def text_hash(text: str) -> int:
    """Stable 64-bit hash of a text, never `NO_HASH`."""
    return xxhash.xxh3_64_intdigest(text.encode()) - 2**63 or 1


def label_hash(label: str | None) -> int:
    """Hash of a class; `NO_HASH` for none."""
    return NO_HASH if label is None else text_hash(label)

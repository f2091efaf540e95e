"""Seals: checksums stored in the same file as the bytes that they protect.

A digest in a file of its own could be that of another writer of the same name.
"""

import xxhash

_MARK = b"xxh3-128"

SEAL_BYTES = len(_MARK) + 16


def is_seal(content: bytes | memoryview) -> bool:
    """Whether some bytes begin as a seal does."""
    return bytes(content[: len(_MARK)]) == _MARK


def seal_of(content: bytes | memoryview) -> bytes:
    """Seal of some bytes: a mark, then their xxh3-128."""
    return _MARK + xxhash.xxh3_128_digest(content)


def check_seal(content: bytes | memoryview, seal: bytes | memoryview) -> None:
    """Raise unless the seal matches the bytes.

    Raises:
        ValueError: it is not, so a bit of either has changed; or there is none.
    """
    if not is_seal(seal):
        raise ValueError("it has no digest, so it was changed since it was written")
    if bytes(seal) != seal_of(content):
        raise ValueError("its content is not what was written: the digest is another")

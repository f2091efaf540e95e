"""Keep freed memory in a process that allocates the same blocks again and again."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
"""Parameters of glibc's `mallopt`."""
_DEFAULTS = {
    _TRIM_THRESHOLD: 128 << 10,
    _TOP_PAD: 128 << 10,
    _MMAP_THRESHOLD: 128 << 10,
    _MMAP_MAX: 1 << 16,
}
_KEPT = {
    _TRIM_THRESHOLD: (1 << 31) - 1,
    _TOP_PAD: 64 << 20,
    _MMAP_THRESHOLD: 32 << 20,
    _MMAP_MAX: 0,
}
"""All blocks of a step lie in the heap, whose end is not returned: also those of 32 MiB and more,
such as the fp32 gradient of an embedding table, which each micro-batch allocates again."""


def give_back_freed_memory() -> None:
    """Return the memory that this process has freed to the system, where the C library can."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep the memory that this process frees within the block for its next allocations.

    glibc by itself returns blocks of a step to the system, which clears each page again for the
    next step. Other C libraries, and allocators that are preloaded, are left as they are.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    for parameter, value in _KEPT.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _DEFAULTS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None

"""A limit of the system on how long files may become, as a full disk has one."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def room_for_files(num_bytes: int) -> Iterator[None]:
    """Inside, this process can write no file beyond so many bytes.

    A write that begins below the limit and would end above it takes what there is room for and
    tells so by its result alone, as on a disk; the next one fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

"""Lock an index, so that only one job at a time writes to it, on any machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from rayembed.pipeline.run.folders import locked_place

INDEXES = "indexes"
"""Folder of the storage with a folder for each index."""


@contextmanager
def locked_index(storage: str, name: str, what: str = "writes the index") -> Iterator[None]:
    """Lock an index against other jobs inside the block.

    Args:
        what: what the other job does that has the lock, after `another job `.

    Raises:
        PlacementError: the storage cannot be written.
        ArtifactError: another job has the index right now; the message names it.
    """
    with locked_place(storage, INDEXES, name, f"{what} {name!r}"):
        yield

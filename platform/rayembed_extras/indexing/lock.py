"""Lock an index, so that only one job at a time writes to it, on any machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from rayembed.pipeline.run.folders import locked_place

INDEXES = "indexes"
"""Folder of the storage with a folder for each index."""


@contextmanager
def locked_index(storage: str, name: str, otherwise: str = "") -> Iterator[None]:
    """Lock an index against other jobs inside the block.

    Args:
        otherwise: what a user can do instead of waiting for the other job, such as `, or …`.

    Raises:
        PlacementError: the storage cannot be written.
        ArtifactError: another job has the index right now; the message names it.
    """
    advice = "wait for it or stop it (`ray job stop`), then give the same command again"
    what = f"has the index {name!r}"
    with locked_place(storage, INDEXES, name, what, advice=advice + otherwise):
        yield

"""A task for processes of a pool, which import this file and little else."""

import os

from rayembed.errors import DataError


def square(item):
    """The square, and the process that made it."""
    if item == 13:
        raise DataError("13 is refused")
    return {"value": item * item, "process": os.getpid()}

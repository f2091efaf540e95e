"""Tiny tensors: on a busy machine threads that wait for each other take minutes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread() -> Iterator[None]:
    """torch, BLAS and OpenMP with one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)

"""Capture the state of random generators before a forward pass, and replay it when the pass is
repeated.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = dict[str, Tensor]
"""Generator states by device: `cpu` and, if a GPU is in use, the current `cuda` device."""


def capture() -> RandomState:
    """Return the states of the random generators of the CPU and, if one is in use, of the current
    GPU.
    """
    state = {"cpu": torch.get_rng_state()}
    # Not `is_available`: a CPU worker on a machine with GPUs would open one to ask for its state.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: RandomState) -> None:
    """Set the random generators to a captured state."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def replayed(state: RandomState) -> Iterator[None]:
    """Use random numbers from `state` inside the block, and restore the former state at its end."""
    devices = [torch.cuda.current_device()] if "cuda" in state else []
    with torch.random.fork_rng(devices=devices):
        restore(state)
        yield

"""Random numbers: recorded before a forward pass, replayed for the same pass done again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = dict[str, Tensor]
"""Generator states by device: `cpu` and, with a GPU, the current `cuda` device."""


def capture() -> RandomState:
    """The state of the CPU's generator and of the current GPU's, if one is in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: RandomState) -> None:
    """Set the generators to a captured state."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def replayed(state: RandomState) -> Iterator[None]:
    """Random numbers from `state` inside, the former stream untouched after it."""
    devices = [torch.cuda.current_device()] if "cuda" in state else []
    with torch.random.fork_rng(devices=devices):
        restore(state)
        yield

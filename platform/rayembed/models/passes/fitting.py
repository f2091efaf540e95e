"""Handle a full GPU in inference: give the model's later forward passes fewer tokens.

Other processes may take memory at any time, and texts differ in length, so that no budget is right
for all. What a pass computes does not depend on the others.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from rayembed.errors import DeviceMemoryError
from rayembed.machine.hardware import (
    default_device,
    memory_in_use,
    ran_out,
    release_memory,
    say_once,
)

_fitting: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Tokens of a pass that a model is left with after memory ran out."""


def fitting_tokens(model: nn.Module, budget: int) -> int:
    """Return the tokens that a forward pass may have: the budget, or fewer after GPU memory ran out
    in this process.
    """
    return min(budget, _fitting.get(model, budget))


def fewer_tokens(model: nn.Module, texts: int, tokens: int, says: str) -> None:
    """Halve the tokens of the model's later forward passes, after one of them ran out of
    memory.

    Args:
        texts: in that pass.
        tokens: in that pass, padding included.
        says: message of the error.

    Raises:
        DeviceMemoryError: the pass had a single text.
    """
    if texts == 1:
        raise no_room(f"a text of {tokens:,} tokens", "lower the model's max_length", says)
    _fitting[model] = fitting_tokens(model, tokens) // 2
    say_fewer(f"{tokens:,} tokens", f"{_fitting[model]:,}", says)


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Raise DeviceMemoryError if GPU memory runs out inside the block, which loads `what`."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise no_room(what, "take a smaller model or bfloat16", first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]


def say_fewer(before: str, after: str, says: str) -> None:
    """Warn that later forward passes will be smaller, and release unused GPU memory."""
    say_once(
        logging.WARNING,
        f"memory ran out in a pass of {before}; the passes of this process have {after} at most "
        f"from now on. PyTorch says: {says}",
    )
    release_memory()


def no_room(what: str, advice: str, says: str) -> DeviceMemoryError:
    """Make a DeviceMemoryError that says what does not fit into memory and how to make it fit."""
    return DeviceMemoryError(
        f"{what} does not fit into memory: {memory_in_use(default_device())}. End what else uses "
        f"the GPU, {advice}, or take a GPU with more memory. PyTorch says: {says}"
    )

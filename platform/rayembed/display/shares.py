"""How far a long unit of work is: its loops tell it, and whoever runs the unit hears it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")

Listener = Callable[[float], None]
"""Called with the share of a unit that is done, from 0 to 1, as often as a loop tells it."""


class _Heard(threading.local):
    listener: Listener | None = None
    first = 0.0
    """Share of the unit that was done before the present piece."""
    width = 1.0
    """Share of the unit that the present piece is."""


_heard = _Heard()


@contextmanager
def hearing(listener: Listener | None) -> Iterator[None]:
    """Have what this thread does inside the block heard, as one unit; None: by nobody."""
    before = _heard.listener, _heard.first, _heard.width
    _heard.listener, _heard.first, _heard.width = listener, 0.0, 1.0
    try:
        yield
    finally:
        _heard.listener, _heard.first, _heard.width = before


def present_listener() -> Listener | None:
    """Who hears what this thread tells, for work that is done elsewhere on its behalf."""
    return _heard.listener


def tell(share: float) -> None:
    """Tell how much of the present piece of work is done, from 0 to 1."""
    if _heard.listener is not None:
        _heard.listener(_heard.first + share * _heard.width)


@contextmanager
def piece(first: float, last: float) -> Iterator[None]:
    """Count what is told inside the block from this share of the present piece up to that one."""
    before = _heard.first, _heard.width
    _heard.first, _heard.width = before[0] + first * before[1], (last - first) * before[1]
    try:
        tell(0.0)
        yield
    finally:
        _heard.first, _heard.width = before


def pieces(items: Sequence[Item]) -> Iterator[Item]:
    """The items, the work on each of which is an equal piece."""
    for place, item in enumerate(items):
        with piece(place / len(items), (place + 1) / len(items)):
            yield item

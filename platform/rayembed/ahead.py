"""Work done ahead of its use by a thread: batches of training, tokens of encoding, corpus parts.

What it does is left to its users; it knows no torch.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, nullcontext
from typing import Any

_SECONDS_BETWEEN_LOOKS = 0.1

_ENDING_SECONDS = 5.0
"""Seconds to wait for the thread at the end; a thread blocked in a read must not delay the error.
"""


def done_ahead(
    work: Callable[[Any], Any], items: Iterable[Any], *, read_ahead: int
) -> Generator[Any]:
    """Results of `work` on each item, in order, made by a thread.

    Closing the iterator ends the thread, which closes `items` where that can be closed.

    Args:
        read_ahead: results that are ready before they are asked for.

    Raises:
        RayembedError: what `work` or `items` raises, after the results before it.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=read_ahead)
    closed = threading.Event()

    def put(item: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            with closing(items) if isinstance(items, Generator) else nullcontext():
                for item in items:
                    if not put(work(item)):
                        return
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
            put(error)
        else:
            put(None)

    thread = threading.Thread(target=run, name="done-ahead", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join(_ENDING_SECONDS)

"""A job that is asked to stop says so at once, ends in order, and at the second time at once.

Libraries put handlers of their own in place of these: Ray one for SIGTERM, which ends in addresses
of C++ functions, and Ray Train one for SIGINT, which says nothing and ends with another code.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_STDERR = 2

_RAY_LOOKS = ("RAY_get_check_signal_interval_milliseconds", "200")
"""Milliseconds between looks for signals of a process that waits for Ray (Ray's own: a second).
Ray reads it when it is imported."""


@dataclass
class HeardSignal:
    """Signal that was heard."""

    number: int | None = None
    """Number of the signal; None: there was none."""

    @property
    def exit_code(self) -> int:
        """Exit code of a stopped process, as shells have it: 128 and the signal's number."""
        return 128 + (self.number or signal.SIGINT)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Take a signal.

        Raises:
            KeyboardInterrupt: it is the first one; another one ends the process here.
        """
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        name = signal.Signals(number).name
        # Past Python's own buffer, which may be in use where the signal comes.
        line = f"\n{name}: the job is stopped in order; the same once more ends it at once\n"
        with contextlib.suppress(OSError):  # of a terminal that is gone
            os.write(_STDERR, line.encode())
        raise KeyboardInterrupt


_current: list[HeardSignal] = []


@contextmanager
def hearing() -> Iterator[HeardSignal]:
    """SIGINT and SIGTERM become `KeyboardInterrupt` inside the block, told at once.

    After one was heard the handlers stay, so that a second one ends what takes long to end. In
    another thread than the main one nothing is heard.
    """
    heard = HeardSignal()
    os.environ.setdefault(*_RAY_LOOKS)
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    _current.append(heard)
    keep_hearing()
    try:
        yield heard
    finally:
        _current.remove(heard)
        if heard.number is None:
            for number, handler in former.items():
                signal.signal(number, handler)


def keep_hearing() -> None:
    """Put the handlers of the block back in place, where a library has set others since."""
    if _current and threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, _current[-1].hear)

"""Handle stop signals: the first one lets the job clean up, the second one ends it at once.

Libraries put handlers of their own in place of these: Ray one for SIGTERM, which ends in addresses
of C++ functions, and Ray Train one for SIGINT, which says nothing and ends with another code.
"""

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a program which does not handle them; of SIGINT Python makes an exception."""

_STDOUT, _STDERR = 1, 2

_RAY_LOOKS = ("RAY_get_check_signal_interval_milliseconds", "200")
"""Milliseconds between looks for signals of a process that waits for Ray (Ray's own: a second).
Ray reads it when it is imported."""


@dataclass(eq=False)
class HeardSignal:
    """Handler of stop signals that remembers which one was received."""

    numbers: tuple[signal.Signals, ...] = _SIGNALS
    """Handled signals."""
    what: str = "job"
    """Name of the stopped activity, in a word."""
    number: int | None = None
    """Number of the received signal; None if there was none."""

    @property
    def exit_code(self) -> int:
        """Exit code of a process stopped by the signal, as in shells: 128 plus the signal's
        number.
        """
        return 128 + (self.number or signal.SIGINT)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise KeyboardInterrupt for the first one, end the process at the
        second.

        Raises:
            KeyboardInterrupt: it is the first one; another one ends the process here, but for
                SIGHUP.
        """
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.number is not None:
            if number == signal.SIGHUP:
                # Of a terminal that is closed it comes twice: from the shell, and from the kernel
                # when the shell has ended.
                return
            os._exit(128 + number)
        self.number = number
        self._tell(number)
        raise KeyboardInterrupt

    def keep(self) -> None:
        """Reinstall the signal handlers."""
        for number in self.numbers:
            signal.signal(number, self.hear)

    def _tell(self, number: int) -> None:
        name = signal.Signals(number).name
        again = "SIGTERM" if number == signal.SIGHUP else "the same once more"
        # Past Python's own buffer, which may be in use where the signal comes.
        line = f"\n{name}: the {self.what} is stopped in order; {again} ends it at once\n"
        with contextlib.suppress(OSError):  # of a terminal that is gone
            os.write(_STDERR, line.encode())


def _leave_terminal() -> None:
    """Discard output after the terminal was closed, since writing to it would raise errors."""
    for stream in (_STDOUT, _STDERR):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:  # of anything else than a terminal ENOTTY
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


_current: list[HeardSignal] = []


@contextmanager
def hearing(
    signals: Sequence[signal.Signals] = _SIGNALS, *, what: str = "job"
) -> Iterator[HeardSignal]:
    """Turn SIGINT, SIGTERM and SIGHUP into `KeyboardInterrupt` inside the block.

    After one was heard the handlers stay, so that a second one ends what takes long to end. In
    another thread than the main one nothing is heard; of SIGHUP nothing under `nohup`.

    Args:
        signals: what is heard.
        what: is stopped, in a word.
    """
    heard = HeardSignal(tuple(signals), what)
    os.environ.setdefault(*_RAY_LOOKS)
    if not signals or threading.current_thread() is not threading.main_thread():
        yield heard
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        heard.numbers = tuple(n for n in signals if n != signal.SIGHUP)
    former = {number: signal.getsignal(number) for number in heard.numbers}
    _current.append(heard)
    heard.keep()
    try:
        yield heard
    finally:
        _current.remove(heard)
        if heard.number is None:
            for number, handler in former.items():
                signal.signal(number, handler)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let the block clean up after SIGTERM or SIGHUP, then end this process as the signal does by
    default.

    A program that handles or ignores one of them keeps its handler; SIGINT is Python's own. In
    another thread than the main one no handler can be set: the signal ends the program at once.
    """
    unhandled = [n for n in _ENDING if signal.getsignal(n) is signal.SIG_DFL]
    with hearing(unhandled, what="call") as heard:
        try:
            yield
        finally:
            if heard.number is not None:
                _end_by(heard.number)


def _end_by(number: int) -> NoReturn:
    """End this process by the signal's default action."""
    with contextlib.suppress(OSError):  # of a terminal that is gone
        sys.stderr.write("stopped; the same call goes on from what is finished\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the first process of a container is not ended by it


def keep_hearing() -> None:
    """Reinstall the signal handlers of the current block, in case a library has replaced them."""
    if _current and threading.current_thread() is threading.main_thread():
        _current[-1].keep()


@contextmanager
def without_hangups() -> Iterator[None]:
    """Start processes inside the block so that closing the terminal does not end them.

    Of Ray's own, which it leaves in this process' group, a checkpoint is still wanted then. They
    inherit what this thread blocks; other threads still get the signal.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)

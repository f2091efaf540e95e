"""Show the progress of a run: as a log line after ten silent seconds, or as one live line in a
terminal or notebook.

Whoever begins something long names it by `doing`; the innermost is what is told. A run with phases
has an `overview` of them, `data ✓ → finetune 0/60 → scores`, told at each change.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TextIO, TypeVar

from rayembed.display.notebook import NotebookLine, NotebookLog, notebook_display

SILENCE_SECONDS = 10.0
"""Seconds without a log line after which progress is logged."""

_LIVE_SECONDS = 1.0
"""Seconds between two updates of the live line."""

_SHARE_OF_TIME = 50
"""Inverse of the share of a run's time that composing the line may take."""

_BAR = 20
"""Width of a progress bar in characters."""

_ours = logging.getLogger("rayembed")
_log = logging.getLogger(__name__)

StatusText = str | Callable[[], str]
"""Description of the current work, without a verb; a function is called for each display."""


@contextmanager
def doing(
    what: StatusText, *, tells_end: bool = False, silence_seconds: float = SILENCE_SECONDS
) -> Iterator[None]:
    """Show a text about the current work whenever the log is silent, for the duration of
    the block.

    A log gets `what` where it has changed since it was last told, and otherwise
    `still what, 20 s`, without what follows two spaces. Of an empty text nothing is told: what is
    done tells itself. Where nobody sees rayembed's log nothing happens.

    Args:
        tells_end: whether a log gets the text at the end too, where it has changed.
    """
    if not (_ours.hasHandlers() and _ours.isEnabledFor(logging.INFO)):
        yield
        return
    activity = _Activity(what)
    with _teller.guard:
        _teller.activities.append(activity)
        if not _teller.is_running:
            _teller.start(silence_seconds)
        if not activity.last:
            _teller.make_room()
    try:
        yield
    finally:
        with _teller.guard:
            _teller.activities.remove(activity)
            last = not _teller.activities
        if last:
            _teller.stop()
        if tells_end and (text := activity.text()) != activity.last:
            _log.info("%s", text)


@contextmanager
def overview(phases: Sequence[str]) -> Iterator[None]:
    """Log all phases of a run at the start, again when a phase begins, and at the end with their
    times.
    """
    whole = _Overview([_Phase(name) for name in phases])
    whole.enter(phases[0])
    _log.info("%s", whole.text())
    before, _teller.overview = _teller.overview, whole
    try:
        yield
        whole.enter(None)
        _log.info("%s", whole.text(with_times=True))
    finally:
        _teller.overview = before


def enter(phase: str, detail: str = "") -> None:
    """Begin a phase in the run's overview; without an overview do nothing.

    Args:
        detail: how far it is, such as `0/60`.
    """
    if _teller.overview is not None:
        _teller.overview.enter(phase, detail)
        _log.info("%s", _teller.overview.text())


def present_phase() -> str:
    """Name of the overview's current phase; empty without an overview."""
    phase = None if _teller.overview is None else _teller.overview.present()
    return "" if phase is None else phase.name


def detail(text: str) -> None:
    """Set the text that the progress line shows for the current phase, such as a step count."""
    if _teller.overview is not None and (phase := _teller.overview.present()) is not None:
        phase.detail = text


def bar(done: float, of: int) -> str:
    """Format progress as a bar `██████░░`, or with ASCII characters if the log cannot encode these
    blocks.
    """
    filled = round(_BAR * done / max(of, 1))
    full, empty = ("█", "░") if _takes("█░") else ("#", ".")
    return full * filled + empty * (_BAR - filled)


def duration(seconds: float) -> str:
    """Format a duration as `0:01:40`, in whole seconds."""
    return str(timedelta(seconds=round(seconds)))


@dataclass(eq=False)
class _Activity:
    what: StatusText
    began: float = field(default_factory=time.monotonic)
    """Time when the activity began, or was last logged with another text."""

    def __post_init__(self) -> None:
        self.last = self.text()

    def text(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    def line(self) -> str:
        """Format the line for the log: the changed text, or how long the unchanged work has
        lasted.
        """
        text, now = self.text(), time.monotonic()
        if text != self.last:
            self.last, self.began = text, now
            return text
        # Figures behind two spaces, which have not changed, are not told again.
        return f"still {text.partition('  ')[0]}, {now - self.began:.0f} s"


@dataclass
class _Phase:
    name: str
    detail: str = ""
    began: float | None = None
    ended: float | None = None


@dataclass
class _Overview:
    phases: list[_Phase]

    def enter(self, name: str | None, detail: str = "") -> None:
        """Begin the named phase and end all phases before it; None ends all phases."""
        now = time.monotonic()
        for phase in self.phases:
            if phase.name == name and phase.began is None:
                phase.began, phase.detail = now, detail
                return
            phase.began = now if phase.began is None else phase.began
            phase.ended = now if phase.ended is None else phase.ended

    def present(self) -> _Phase | None:
        begun = (each for each in self.phases if each.began is not None and each.ended is None)
        return next(begun, None)

    def text(self, *, with_times: bool = False) -> str:
        fits = _takes("✓→")
        return (" → " if fits else " -> ").join(
            phase.name
            + (f" {phase.detail}" if phase.detail and phase.ended is None else "")
            + ("" if phase.ended is None else " ✓" if fits else " ok")
            + (f" {duration((phase.ended or 0) - (phase.began or 0))}" if with_times else "")
            for phase in self.phases
        )


class _Terminal:
    """Progress line at the bottom of a terminal, updated in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str) -> None:
        from shutil import get_terminal_size

        # The cursor stays at its beginning: what others write begins there.
        self._write(f"\x1b[2K{text[: get_terminal_size().columns - 1]}\r")

    def clear(self) -> None:
        self._write("\x1b[2K")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # it is gone, and what is told of goes on
            self._stream.write(text)
            self._stream.flush()


_Live = _Terminal | NotebookLine
"""A line that changes."""


def live_line() -> _Live | None:
    """Return the progress line of the notebook or terminal that shows the log; None if the log goes
    elsewhere. it is shown in neither.
    """
    logs = (handler for handler in _ours.handlers if isinstance(handler, NotebookLog))
    if log := next(logs, None):
        return log.line
    display = notebook_display()
    if display is not None:
        return NotebookLine(display)
    return _Terminal(sys.stderr) if sys.stderr.isatty() else None


def _takes(text: str) -> bool:
    """Whether standard error, to which the log is written, can encode the text."""
    try:
        # A stream that names no encoding keeps texts, not bytes.
        text.encode(getattr(sys.stderr, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


class _Teller(logging.Handler):
    """Log handler that shows the current work from its own thread whenever no log record has come
    for a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guard = threading.Lock()
        self.activities: list[_Activity] = []
        self.overview: _Overview | None = None
        self.is_running = False
        self._live: _Live | None = None
        self._logged = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Clear the live line before another handler writes the record, and note the time."""
        self._logged = time.monotonic()
        self.make_room()

    def make_room(self) -> None:
        """Remove the live line from the screen until it is shown again."""
        if self._live is not None:
            self._live.clear()

    def start(self, silence_seconds: float) -> None:
        self._silence, self._stop = silence_seconds, threading.Event()
        self._live, self._logged, self.is_running = live_line(), time.monotonic(), True
        _ours.handlers.insert(0, self)  # before the one that shows the line
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        _ours.removeHandler(self)
        if self._live is not None:
            self._live.show("")
        self._live, self.is_running = None, False

    def _tell(self) -> None:
        pause = wait = min(_LIVE_SECONDS, self._silence / 2)
        while not self._stop.wait(wait):
            began = time.monotonic()
            with self.guard:
                newest = self.activities[-1:]
            for activity in newest:
                self._tell_of(activity)
            wait = max(pause, _SHARE_OF_TIME * (time.monotonic() - began))

    def _tell_of(self, activity: _Activity) -> None:
        if not activity.text():
            return
        if self._live is not None:
            self._live.show(self._now(activity))
        elif time.monotonic() - self._logged >= self._silence:
            _log.info("%s", activity.line())

    def _now(self, activity: _Activity) -> str:
        text = f"{activity.text()}  {duration(time.monotonic() - activity.began)}"
        return text if self.overview is None else f"{self.overview.text()}  |  {text}"


_teller = _Teller()


Item = TypeVar("Item")

Listener = Callable[[float], None]
"""Function that receives the finished share of a unit, from 0 to 1, as often as a loop reports it.
"""


class _Heard(threading.local):
    listener: Listener | None = None
    first = 0.0
    """Finished share of the unit before the current piece."""
    width = 1.0
    """Share of the unit that the current piece covers."""


_heard = _Heard()


@contextmanager
def hearing(listener: Listener | None) -> Iterator[None]:
    """Send progress reported by this thread to a listener, for the duration of the block; None
    discards it.
    """
    before = _heard.listener, _heard.first, _heard.width
    _heard.listener, _heard.first, _heard.width = listener, 0.0, 1.0
    try:
        yield
    finally:
        _heard.listener, _heard.first, _heard.width = before


def present_listener() -> Listener | None:
    """Return this thread's progress listener, to pass it to another thread that works for it."""
    return _heard.listener


def tell(share: float) -> None:
    """Report the finished share of the current piece of work, from 0 to 1."""
    if _heard.listener is not None:
        _heard.listener(_heard.first + share * _heard.width)


@contextmanager
def piece(first: float, last: float) -> Iterator[None]:
    """Map progress from 0 to 1 reported in the block to the range from `first` to `last` of the
    surrounding work.
    """
    before = _heard.first, _heard.width
    _heard.first, _heard.width = before[0] + first * before[1], (last - first) * before[1]
    try:
        tell(0.0)
        yield
    finally:
        # Not the listener: a generator that was left in the middle ends long after its block.
        _heard.first, _heard.width = before


def pieces(items: Sequence[Item]) -> Iterator[Item]:
    """Iterate over items and count each as an equal share of the current work's progress."""
    for place, item in enumerate(items):
        with piece(place / len(items), (place + 1) / len(items)):
            yield item

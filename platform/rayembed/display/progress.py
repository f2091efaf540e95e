"""What a run does now: in a log a line after ten seconds without any, on a terminal and in a
notebook one line that changes.

Whoever begins something long names it by `doing`; the innermost is what is told. A run with phases
has an `overview` of them, `data ✓ → finetune 0/60 → scores`, told at each change.
"""

import html
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO, TypeVar

SILENCE_SECONDS = 10.0
"""Seconds without a line after which one is written."""

_LIVE_SECONDS = 1.0
"""Seconds between two changes of a line that changes."""

_SHARE_OF_TIME = 50
"""Making a line may take the inverse of this of a run's time."""

_BAR = 20
"""Width of a bar in characters."""

_ours = logging.getLogger("rayembed")
_log = logging.getLogger(__name__)

Told = str | Callable[[], str]
"""What is done, in words without a verb; a function is asked whenever it is told."""


@contextmanager
def doing(
    what: Told, *, tells_end: bool = False, silence_seconds: float = SILENCE_SECONDS
) -> Iterator[None]:
    """Tell inside the block what is done, as long as nothing else is logged.

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
    """Tell a run's phases before the first, at each `enter`, and with their times at the end."""
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
    """Tell that a phase of the overview begins, if there is one.

    Args:
        detail: how far it is, such as `0/60`.
    """
    if _teller.overview is not None:
        _teller.overview.enter(phase, detail)
        _log.info("%s", _teller.overview.text())


def present_phase() -> str:
    """Name of the overview's present phase; empty where there is none."""
    phase = None if _teller.overview is None else _teller.overview.present()
    return "" if phase is None else phase.name


def detail(text: str) -> None:
    """Note how far the present phase is, for a line that changes."""
    if _teller.overview is not None and (phase := _teller.overview.present()) is not None:
        phase.detail = text


def bar(done: float, of: int) -> str:
    """`██████░░`, in plain characters where the log takes no others."""
    filled = round(_BAR * done / max(of, 1))
    full, empty = ("█", "░") if _takes("█░") else ("#", ".")
    return full * filled + empty * (_BAR - filled)


def duration(seconds: float) -> str:
    """`0:01:40`, in whole seconds."""
    return str(timedelta(seconds=round(seconds)))


@dataclass(eq=False)
class _Activity:
    what: Told
    began: float = field(default_factory=time.monotonic)
    """When it began, or was last told with another text."""

    def __post_init__(self) -> None:
        self.last = self.text()

    def text(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    def line(self) -> str:
        """What a log is told."""
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
        """End the present phase, and all before the one of the name; None: all."""
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
    """The last line of a terminal."""

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


class _Notebook:
    """An output of a notebook's cell."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._output = display(self._shown(""), raw=True, display_id=True)

    def show(self, text: str) -> None:
        self._output.update(self._shown(text), raw=True)

    def clear(self) -> None:
        """Leave it: the next text comes in its place."""

    @staticmethod
    def _shown(text: str) -> dict[str, str]:
        return {"text/html": f"<pre>{html.escape(text)}</pre>", "text/plain": text}


_Live = _Terminal | _Notebook
"""A line that changes."""


def live_line() -> _Live | None:
    """The line that changes: of the notebook or the terminal that the log is shown in; None: it is
    shown in neither.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if ipython is not None and getattr(shell, "kernel", None) is not None:
        return _Notebook(ipython.display.display)
    return _Terminal(sys.stderr) if sys.stderr.isatty() else None


def _takes(text: str) -> bool:
    """Whether the stream that the log goes to can encode the text."""
    try:
        # A stream that names no encoding keeps texts, not bytes.
        text.encode(getattr(sys.stderr, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


class _Teller(logging.Handler):
    """Tells what is done, from a thread of its own; hears when others log."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = threading.Lock()
        self.activities: list[_Activity] = []
        self.overview: _Overview | None = None
        self.is_running = False
        self._live: _Live | None = None
        self._logged = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Make room for a line of the log, and note when it came."""
        self._logged = time.monotonic()
        self.make_room()

    def make_room(self) -> None:
        """Take the line that changes away until it is shown again."""
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
        # Not the listener: a generator that was left in the middle ends long after its block.
        _heard.first, _heard.width = before


def pieces(items: Sequence[Item]) -> Iterator[Item]:
    """The items, the work on each of which is an equal piece."""
    for place, item in enumerate(items):
        with piece(place / len(items), (place + 1) / len(items)):
            yield item

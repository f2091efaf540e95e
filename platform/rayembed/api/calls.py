"""Shared argument checks and progress display of the Python functions."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rayembed.config.credentials import check_address
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.config.types import expanded_name
from rayembed.display.notebook import NotebookLog, notebook_display
from rayembed.display.progress import bar, doing, duration
from rayembed.display.quiet import quiet
from rayembed.pipeline.stopping import ended_in_order

_SHORT_SECONDS = 2.0
"""Maximum seconds of a call without a progress display."""


def reference_of(model: str | Path) -> str:
    """Resolve a short model name to its asset reference; other texts are returned unchanged."""
    text = expanded_name(str(model))
    return text if "://" in text or ":/" in text else str(Path(text).expanduser())


def check_addresses(**given: Any) -> None:
    """Raise if an argument or setting of a call is an address with a password, key or
    token.

    Raises:
        ConfigError: one is; the message names it and does not repeat it.
    """
    for name, value in given.items():
        if isinstance(value, Mapping):
            check_addresses(**{f"{name}[{path!r}]": each for path, each in value.items()})
        elif isinstance(value, str | Path):
            check_address(value, f"{name}=")
        elif isinstance(value, list | tuple):
            check_addresses(**{f"{name}[{i}]": each for i, each in enumerate(value)})


def default_name(kind: str, run: Run, keys: Iterable[str]) -> str:
    """Derive a run's default name from its settings and the content of its files, so that changed
    rows start a new run.

    Args:
        kind: begins the name.
        keys: of the pieces of its files, which change with what these hold.
    """
    return f"{kind}-{fingerprint([run.fingerprint, sorted(keys)])}"


def assignments_of(settings: Mapping[str, Any]) -> list[str]:
    """Convert settings by path to the texts `path=value` that `--set` takes."""
    return [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in settings.items()
    ]


@contextmanager
def shown() -> Iterator[None]:
    """Show rayembed's log inside the block, unless the caller has set up logging; a stop signal
    lets the block clean up first.
    """
    with ended_in_order(), _log_shown():
        yield


class EncodingProgress:
    """Progress display of an `encode` call: encoded texts, texts per second and remaining time;
    calls of a few seconds show nothing. Called with the number of texts encoded so far, and of all.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._done, self._of = 0, 0
        self._shown = ExitStack()
        self._is_shown = False

    def __enter__(self) -> "EncodingProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def __call__(self, done: int, of: int) -> None:
        """Record the number of encoded texts, and start the display once the call has lasted a few
        seconds.
        """
        self._done, self._of = done, of
        if not self._is_shown and time.monotonic() - self._began >= _SHORT_SECONDS:
            self._is_shown = True
            self._shown.enter_context(_log_shown())
            self._shown.enter_context(doing(self._text))

    def _text(self) -> str:
        rate = self._done / (time.monotonic() - self._began)
        left = duration((self._of - self._done) / rate)
        so_far = f"embedding texts  {bar(self._done, self._of)}  {self._done:,}/{self._of:,}"
        return f"{so_far}  {rate:,.0f} texts/s  {left} left"


@contextmanager
def _log_shown() -> Iterator[None]:
    quiet()
    logger = logging.getLogger("rayembed")
    if logger.hasHandlers():
        yield
        return
    display, level = notebook_display(), logger.level
    handler: logging.Handler
    if display is None:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    else:
        handler = NotebookLog(display)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()

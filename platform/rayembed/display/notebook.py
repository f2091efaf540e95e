"""Output in a notebook's cell: one progress line that is updated in place, and the log as one
block.
"""

import html
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_LINES = 1000
"""Lines of a log that are kept, the last ones."""

_TAIL = 6
"""Lines that are shown while the work goes on."""

Display = Callable[..., Any]


def notebook_display() -> Display | None:
    """Return IPython's `display` function in a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    display: Display = ipython.display.display
    return display


class NotebookLine:
    """Output of a notebook's cell whose text can be replaced."""

    def __init__(self, display: Display) -> None:
        self._output = display(_preformatted(""), raw=True, display_id=True)

    def show(self, text: str) -> None:
        """Replace the shown text."""
        self.replace(_preformatted(text))

    def clear(self) -> None:
        """Do nothing, because the next text replaces the shown one."""

    def replace(self, shown: dict[str, str]) -> None:
        """Replace the output by contents given by MIME type."""
        self._output.update(shown, raw=True)


class NotebookLog(logging.Handler):
    """Log handler that shows a call's last lines in one notebook output, and at the end all lines,
    folded.

    Warnings are written to standard error as well, so that they are seen without unfolding.
    """

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.line = _LineBelowLog(self, display)
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._count, self._began = 0, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line to the shown log, with the time since the call began."""
        text = self.format(record)
        self._count += 1
        self._lines.append(f"{self._elapsed()}  {text}")
        if record.levelno >= logging.WARNING:
            sys.stderr.write(f"{text}\n")
        self.show("")

    def show(self, text: str) -> None:
        """Show the last log lines, followed by the text of the progress line."""
        last = list(self._lines)[-_TAIL:]
        self.line.replace(_preformatted("\n".join([*last, text] if text else last)))

    def close(self) -> None:
        """Replace the shown lines by the whole log, folded; by nothing if no line was logged."""
        super().close()
        if not self._count:
            self.line.replace(_preformatted(""))
            return
        lines = "\n".join(self._lines)
        summary = f"{self._count} lines of log in {self._elapsed()}"
        folded = f"<details><summary>{summary}</summary><pre>{html.escape(lines)}</pre></details>"
        self.line.replace({"text/html": folded, "text/plain": f"{summary}\n{lines}"})

    def _elapsed(self) -> str:
        return str(timedelta(seconds=round(time.monotonic() - self._began)))


class _LineBelowLog(NotebookLine):
    def __init__(self, log: NotebookLog, display: Display) -> None:
        super().__init__(display)
        self._log = log

    def show(self, text: str) -> None:
        self._log.show(text)


def _preformatted(text: str) -> dict[str, str]:
    return {"text/html": f"<pre>{html.escape(text)}</pre>", "text/plain": text}

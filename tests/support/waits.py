"""Waits that are noted, or passed by a clock, and not waited, in one module.

A changed `time.sleep` or `asyncio.sleep` would be that of the whole process: threads that other
tests left behind would run without a pause, and note their waits too.
"""

import time
from types import ModuleType
from typing import Any

import pytest


class Replaced:
    """A library as one module sees it: some names changed, all others the library's own."""

    def __init__(self, library: ModuleType, **changed: Any) -> None:
        self._library = library
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def note_waits(patch: pytest.MonkeyPatch, *modules: str) -> list[float]:
    """The seconds that the modules, which `import time`, would have slept."""
    waited: list[float] = []
    for module in modules:
        patch.setattr(f"{module}.time", Replaced(time, sleep=waited.append))
    return waited

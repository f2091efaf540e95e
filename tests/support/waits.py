"""Waits that are noted and not waited, in one module.

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


def note_waits(patch: pytest.MonkeyPatch, *modules: str) -> list[float]:
    """The seconds that the modules, which `import time`, would have slept."""
    waited: list[float] = []
    for module in modules:
        patch.setattr(f"{module}.time", Replaced(time, sleep=waited.append))
    return waited

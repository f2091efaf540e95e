"""In every process of the drill: one gradient of a training worker becomes NaN, where a file asks.

Python imports this module by its name before any other, from a folder on PYTHONPATH. The file that
`DRILL_NAN` names holds the worker's rank and the step, from 1; without the file nothing changes.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_ENGINE = "rayembed.training.engine"


class _Breaks:
    """Changes the engine's module when it has been imported."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The engine's module with another loader; all others are none of this."""
        if name != _ENGINE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _change(self, module: Any) -> None:
        backward, wanted, done = module.DeepSpeedEngine.backward, self, {"steps": 0}

        def broken(engine: Any, loss: Any, last: bool) -> None:
            if done["steps"] + 1 == wanted._step and module.rank() == wanted._rank:
                loss = loss * math.nan
            done["steps"] += last
            backward(engine, loss, last)

        module.DeepSpeedEngine.backward = broken


_FILE = Path(os.environ.get("DRILL_NAN", "/nonexistent"))
if _FILE.is_file():
    sys.meta_path.insert(0, _Breaks(*map(int, _FILE.read_text().split())))  # type: ignore[arg-type]

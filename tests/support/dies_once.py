"""A task whose process is killed once, as a machine that is lost would be."""

import os
import signal
from pathlib import Path
from typing import Any

from rayembed.data.engine.work_items import Result, _SavingTask, _TimedTask


def innermost(task: Any) -> Any:
    """The task of a data step, without what sends its rows, keeps its result or takes its time."""
    while hasattr(task, "task"):
        task = task.task
    return task


class DiesOnce:
    """A task of which one process gets SIGKILL, when all but a unit's result is done.

    Args:
        folder: where a folder of the task's name tells that it has died.
    """

    def __init__(self, task: Any, folder: Path) -> None:
        self.task, self.folder = task, folder

    def __call__(self, unit: Any, *device: str) -> Result:
        inner = self.task
        while isinstance(inner, _SavingTask | _TimedTask):
            inner = inner.task
        named = innermost(inner)
        try:
            (self.folder / f"{type(named).__name__}{getattr(named, 'of', '')}").mkdir()
        except FileExistsError:
            result: Result = self.task(unit, *device)
            return result
        inner(unit, *device)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it should be dead")

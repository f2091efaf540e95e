"""Hang detection: a worker without progress reports its code position before a collective operation
times out.

A collective that times out says on the workers that waited that somebody did not come. So each
worker has a thread that looks at the time since its last step. When most of the time limit of
collectives is over, it writes the Python stack of the training into the worker's log and tells the
driver's side, which puts together who waits, who is elsewhere, and who says nothing. Knows no Ray,
and no backend: it serves gloo and NCCL alike.
"""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from rayembed.distributed.collectives import rank, world_size
from rayembed.training.faults.hang_reports import Where
from rayembed.training.trainer import Callback, StageTrainer, StepRecord

logger = logging.getLogger(__name__)

SHARE = 0.8
"""Share of the time limit of collectives after which a worker without a step tells where it is."""

_LOOKS = 20
"""Looks at the clock in that time."""

_WAITS_IN = ("torch.distributed", "deepspeed.comm")
"""Packages of the innermost frames of a worker that waits for others."""

_PACKAGE = Path(__file__).parents[2]
"""Folder of this library. A name in a path says nothing: a checkout may be called rayembed, with
the libraries in a folder below it."""


class HangWatch(Callback):
    """Reports this worker's code position when the training thread, which enters the `with` block,
    makes no step for too long.

    Args:
        limit_seconds: time without a step after which it tells.
        tell: takes what a worker tells: at the start of the training, so that it is known, and when
            it hangs.
    """

    def __init__(self, limit_seconds: float, tell: Callable[[Where], object]) -> None:
        self._limit, self._tell = limit_seconds, tell
        self._step, self._beat = 0, time.monotonic()
        self._starts: threading.Event = threading.Event()
        self._ended = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> "HangWatch":
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Report this worker once, and start measuring the time between steps."""
        self._alive(step)
        self._tell(self._where())
        self._starts.set()

    def on_step_end(self, record: StepRecord) -> None:
        """Record that a step was made now."""
        self._alive(record["step"])

    def before_checkpoint(self) -> None:
        """Record the time, as a checkpoint counts as progress."""
        self._alive(self._step)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Record the time, as a checkpoint counts as progress."""
        self._alive(step)

    def _alive(self, step: int) -> None:
        self._step, self._beat = step, time.monotonic()

    def _watch(self) -> None:
        told = 0.0
        while not self._ended.wait(self._limit / _LOOKS):
            beat = self._beat
            if not self._starts.is_set() or beat == told or time.monotonic() - beat < self._limit:
                continue
            told = beat
            stack = _stack(sys._current_frames().get(self._watched))
            where = self._where(_place(stack), _waits(stack))
            frames = traceback.StackSummary.extract(reversed(stack))
            logger.warning(
                "%s has made no step for %.0f s; its training thread is at:\n%s",
                *(where.name, self._limit, "".join(frames.format())),
            )
            self._tell(where)

    def _where(self, place: str = "", waits: bool = False) -> Where:
        host, process = socket.gethostname(), os.getpid()
        return Where(rank(), world_size(), host, process, self._step, place, waits)


def _stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return the thread's frames with line numbers, innermost first; empty if the thread
    has ended.
    """
    return [] if frame is None else list(traceback.walk_stack(frame))


def _place(stack: Sequence[tuple[FrameType, int]]) -> str:
    """Format the innermost frame in rayembed's code, such as `training/contrastive/step.py:123 in
    run_step`, or else the innermost frame.
    """
    for frame, line in stack:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            return f"{file.relative_to(_PACKAGE).as_posix()}:{line} in {frame.f_code.co_name}"
    for frame, line in stack:
        return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return "the end of its thread"


def _waits(stack: Sequence[tuple[FrameType, int]]) -> bool:
    modules = [str(frame.f_globals.get("__name__")) + "." for frame, _ in stack[:4]]
    return any(name.startswith(f"{package}.") for name in modules for package in _WAITS_IN)

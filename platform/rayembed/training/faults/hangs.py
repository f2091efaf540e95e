"""Workers that make no step: each tells where its training stands, before a collective times out.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from rayembed.distributed.collectives import rank, world_size
from rayembed.training.trainer import Callback, StageTrainer, StepRecord


@dataclass(frozen=True)
class Where:
    """What a worker tells of itself."""

    rank: int
    workers: int
    host: str
    process: int
    step: int
    """Steps that were done."""
    place: str = ""
    """Innermost line of the library that the training is in; empty: it trains."""
    waits: bool = False
    """Whether that line waits for other workers in a collective."""

    @property
    def name(self) -> str:
        """The worker, its process and its node."""
        return f"worker {self.rank} (process {self.process} on {self.host})"


class Hang:
    """What the workers of a training told, put together; one object beside the driver."""

    def __init__(self) -> None:
        self._known: dict[int, Where] = {}
        self._hang: dict[int, Where] = {}

    def take(self, where: Where) -> None:
        """Take what a worker tells. A start of the workers makes earlier ones forgotten."""
        if where.place:
            self._hang[where.rank] = where
            return
        if where.rank in self._known:  # the workers were started anew
            self._known, self._hang = {}, {}
        self._known[where.rank] = where

    def is_over(self) -> None:
        """Forget who hung: the training goes on."""
        self._hang = {}

    def __str__(self) -> str:
        """Who waits, who is elsewhere and who says nothing; empty if no worker hangs."""
        if not self._hang:
            return ""
        return _told(self._known, self._hang)


def _told(known: Mapping[int, Where], hang: Mapping[int, Where]) -> str:
    silent = [known[number] for number in sorted(known.keys() - hang.keys())]
    places: dict[tuple[bool, int, str], list[int]] = {}
    for number, where in sorted(hang.items()):
        places.setdefault((where.waits, where.step, where.place), []).append(number)
    parts = [
        f"{_workers(numbers)} after step {step}: {'waiting for others' if waits else 'at work'} at "
        f"{place}"
        for (waits, step, place), numbers in sorted(places.items())
    ]
    for where in silent:
        parts.append(
            f"{where.name} says nothing: it was stopped, its node is cut off, or it holds Python's "
            "lock; look there with `ps` and in its kernel log"
        )
    missing = sorted(
        {where.rank for where in silent}
        | {number for number, where in hang.items() if not where.waits}
    )
    if missing and len(missing) < len(known):
        parts.append(f"so {_workers(missing)} did not arrive")
    return f"the training hangs. {'; '.join(parts)}"


def _workers(numbers: list[int]) -> str:
    """`worker 3`, `workers 0-2, 5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)
    return f"worker{'s' if len(numbers) > 1 else ''} {text}"


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
    """Watches the training of the thread that enters its `with` block.

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

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Make this worker known, and start the clock."""
        self._alive(step)
        self._tell(self._where())
        self._starts.set()

    def on_step_end(self, record: StepRecord) -> None:
        """Take note of the step."""
        self._alive(record["step"])

    def before_checkpoint(self) -> None:
        """Take note of the time."""
        self._alive(self._step)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Take note of the time."""
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
                "%s has made no step for %.0f s; its training stands here:\n%s",
                *(where.name, self._limit, "".join(frames.format())),
            )
            self._tell(where)

    def _where(self, place: str = "", waits: bool = False) -> Where:
        host, process = socket.gethostname(), os.getpid()
        return Where(rank(), world_size(), host, process, self._step, place, waits)


def _stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Frames with their lines, the innermost first; of a thread that has ended there are none."""
    return [] if frame is None else list(traceback.walk_stack(frame))


def _place(stack: Sequence[tuple[FrameType, int]]) -> str:
    """The innermost frame of this library, as `training/contrastive/step.py:123 in run_step`; the
    innermost of all where this library has none.
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

"""Watch the processes that run units of data work: log slow units, kill processes that exceed the
time limit.

A process of its own, the watch, hears from all workers what they begin. The driver asks it now and
then. A stopped or hanging process cannot end itself, so a task on its node kills it, and Ray runs
its units in another process.
"""

import logging
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayembed.display.progress import Listener, duration, hearing
from rayembed.errors import WorkerError

Place = tuple[str, int]
"""Node and process id."""

TRIES = 3
"""Number of processes in which a unit may exceed the time limit."""

_FEWEST_TASKS = 2048
_TASKS_PER_CPU = 64
_TRIED_PER_CPU = 8
_SECONDS_OF_TASK = 2.0
_SECONDS_OF_TASK_PER_CPU = 0.1
"""Ray Data takes about 12 ms of the driver for a task (measured on two loaded cores), so that with
1,000 CPUs and tasks of 100 seconds the driver is busy for an eighth of the time."""


@dataclass(frozen=True)
class Running:
    """A unit of work that is running, and the process that runs it."""

    number: int
    """Index among the units of the execution."""
    name: str
    """Key of the unit, with its file if it reads one."""
    place: Place
    seconds: float
    """Age in seconds."""
    share: float = 0.0
    """Share of the unit that is done, as last reported by its process."""


class Watch:
    """Registry of all running units and of the processes that run them, kept in a Ray actor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, dict[Place, Running]] = {}
        """Running units of each execution, with their start time in place of their age."""
        self._late: dict[str, Counter[int]] = {}

    def take(self, execution: str, numbers: list[int], name: str, place: Place) -> list[int]:
        """Register which units of work a process will run, and return how often each of them has
        timed out before.

        Args:
            numbers: of the units that a process takes; it begins the first.
            name: of the first.
        """
        self.begin(execution, numbers[0], name, place)
        late = self._late.get(execution, Counter())
        return [late[number] for number in numbers]

    def begin(self, execution: str, number: int, name: str, place: Place) -> None:
        """Record that a process starts a unit of work, and so has finished its previous one."""
        running = self._running.setdefault(execution, {})
        # The process that had it before is dead.
        for other in [p for p, one in running.items() if one.number == number]:
            self.end(execution, other)
        running[place] = Running(number, name, place, self._clock())

    def note(self, execution: str, place: Place, share: float) -> None:
        """Record which share of its unit of work a process has done."""
        running = self._running.get(execution, {})
        if place in running:
            running[place] = replace(running[place], share=share)

    def end(self, execution: str, place: Place) -> None:
        """Record that a process has finished all its units of work."""
        self._running.get(execution, {}).pop(place, None)

    def running(self, execution: str) -> list[Running]:
        """Return the running units of work, the longest-running first."""
        now, found = self._clock(), self._running.get(execution, {})
        units = [replace(one, seconds=now - one.seconds) for one in found.values()]
        return sorted(units, key=lambda unit: -unit.seconds)

    def count_late(self, execution: str, unit: Running, *, ended: bool) -> None:
        """Remove the process of a unit of work that exceeded the time limit, and count the
        timeout.

        Args:
            ended: whether it was alive and has been killed for that.
        """
        self.end(execution, unit.place)
        self._late.setdefault(execution, Counter())[unit.number] += ended

    def forget(self, execution: str) -> None:
        """Drop the state of a finished execution."""
        self._running.pop(execution, None)
        self._late.pop(execution, None)


def name_of(item: object) -> str:
    """Name of a unit of work for messages: its key, and the file that it reads, if any."""
    key = str(getattr(item, "key", item))
    for holder in (item, getattr(item, "part", None), getattr(item, "piece", None)):
        if isinstance(path := getattr(holder, "path", None), str):
            return f"{key} of {path}"
    return key


def too_late(name: str, seconds: float) -> str:
    """Make the error message for a unit of work that exceeded the time limit in every process that
    tried it.
    """
    return (
        f"the unit {name} took longer than placement.unit_seconds={seconds:g} in each of {TRIES} "
        "processes, which were killed. Look at its file and its storage (`py-spy dump` shows "
        "where such a process hangs); raise placement.unit_seconds if the unit needs "
        "longer. The same command continues from the finished units"
    )


def next_units(left: int, cpus: int, seconds: float | None) -> tuple[int, int]:
    """Return how many units of work to submit next, and how many of them each Ray task
    runs.

    Few units are tried first where there are many: how long they take decides how many share a
    task. So the cost that Ray has for each task does not show, and no execution has so many tasks
    that setting it up does.

    Args:
        left: units that have not been run.
        cpus: of the cluster.
        seconds: mean of a unit by now; None: none has been run.
    """
    most = max(_FEWEST_TASKS, _TASKS_PER_CPU * cpus)
    if seconds is None:
        return (left if left <= _TASKS_PER_CPU * cpus else _TRIED_PER_CPU * cpus), 1
    target = max(_SECONDS_OF_TASK, _SECONDS_OF_TASK_PER_CPU * cpus)
    evenly = -(-left // (4 * cpus))
    each = max(1, min(int(target / max(seconds, 1e-6)), evenly))
    return min(left, most * each), each


log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 10.0

_TELLING_SECONDS = 60.0
"""Age in seconds from which a unit is logged, and seconds between two log lines about it."""

_NOTE_SECONDS = 5.0
"""Seconds between two progress reports of a process."""

_KILL_SECONDS = 60.0
"""Timeout in seconds for the task that kills a worker on its node."""


@dataclass(frozen=True)
class Guard:
    """Handle through which worker processes report their units of work to the `Watch` actor."""

    watch: Any
    execution: str
    limit_seconds: float

    def watched(self, units: Sequence[tuple[int, Any]]) -> Iterator[Any]:
        """Yield the items of numbered units of work one by one, reporting each unit to the `Watch`
        actor before it starts.

        Raises:
            WorkerError: a unit was too late too often.
        """
        place: Place = (ray.get_runtime_context().get_node_id(), os.getpid())
        numbers, first = [number for number, _ in units], name_of(units[0][1])
        # An answer is waited for: a process that stops at once would have told nothing.
        late = _late(self.watch.take.remote(self.execution, numbers, first, place), len(numbers))
        try:
            for (number, item), times in zip(units, late, strict=True):
                name = name_of(item)
                if times >= TRIES:
                    raise WorkerError(too_late(name, self.limit_seconds))
                if number != numbers[0]:
                    self.watch.begin.remote(self.execution, number, name, place)
                with hearing(self._noting(place)):
                    yield item
        finally:
            self.watch.end.remote(self.execution, place)

    def _noting(self, place: Place) -> Listener:
        """Make the listener that reports the progress of a unit of work to the `Watch` actor from
        time to time.
        """
        last, pause = time.monotonic(), _pause(_NOTE_SECONDS, self.limit_seconds)

        def note(share: float) -> None:
            nonlocal last
            if time.monotonic() - last >= pause:
                last = time.monotonic()
                self.watch.note.remote(self.execution, place, share)

        return note


def _late(answer: Any, number: int) -> list[int]:
    try:
        found: list[int] = ray.get(answer)
    except ray.exceptions.RayError as error:
        # Work goes on without a watch.
        log.warning(
            "slow work items are not reported, because the actor that watches them does not "
            "respond: %s",
            error,
        )
        return [0] * number
    return found


@contextmanager
def watching(limit_seconds: float, listener: Listener | None = None) -> Iterator[Guard]:
    """Watch one execution: log its slow units of work, and kill processes whose unit exceeds the
    time limit.

    Args:
        listener: hears how much of the units that run is done, as a number of units.
    """
    context = ray.get_runtime_context()
    watch = _watch(context.gcs_address, context.get_job_id())
    guard, stop = Guard(watch, uuid.uuid4().hex, limit_seconds), threading.Event()
    thread = threading.Thread(target=_look, args=(guard, stop, listener), name="watch", daemon=True)
    thread.start()
    try:
        yield guard
    finally:
        stop.set()
        watch.forget.remote(guard.execution)


@lru_cache(maxsize=1)
def _watch(*driver: str) -> Any:
    """Start the driver's `Watch` actor once, on the driver's node, since losing this node ends the
    driver too.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    watch = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    return watch(Watch).remote()


def _look(guard: Guard, stop: threading.Event, listener: Listener | None) -> None:
    told = 0.0
    pause = _pause(_SECONDS_BETWEEN_LOOKS, guard.limit_seconds)
    while not stop.wait(pause):
        try:
            running: list[Running] = ray.get(guard.watch.running.remote(guard.execution))
        except (ray.exceptions.RayError, RuntimeError) as error:
            # Whoever waits for results hears what the cluster has.
            log.debug("cannot ask which work items are slow: %s", error)
            continue
        if listener is not None:
            listener(sum(unit.share for unit in running))
        for unit in running:
            if unit.seconds > guard.limit_seconds and not stop.is_set():
                try:
                    _end(guard, unit)
                except (ray.exceptions.RayError, RuntimeError) as error:
                    log.warning(
                        "cannot kill the process of the work item %s, which exceeds the time "
                        "limit: %s",
                        unit.name,
                        error,
                    )
        told += pause
        if running and running[0].seconds >= _TELLING_SECONDS and told >= _TELLING_SECONDS:
            told = 0.0
            log.info("%s", _line(running, guard.limit_seconds))


def _pause(usual: float, limit_seconds: float) -> float:
    return min(usual, limit_seconds / 4)


def _line(running: Sequence[Running], limit_seconds: float) -> str:
    oldest = ", ".join(f"{unit.name} for {duration(unit.seconds)}" for unit in running[:3])
    return (
        f"{len(running)} units are running; the longest: {oldest} (placement.unit_seconds is "
        f"{duration(limit_seconds)})"
    )


def _end(guard: Guard, unit: Running) -> None:
    """Kill the process of a unit of work that exceeded the time limit."""
    node, process = unit.place
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    kill = ray.remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=on_node)
    killing = kill.remote(guard, unit)
    try:
        ended = bool(ray.get(killing, timeout=_KILL_SECONDS))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(killing, force=True)
        raise
    ray.get(guard.watch.count_late.remote(guard.execution, unit, ended=ended))
    if ended:
        log.warning(
            "the work item %s took longer than placement.unit_seconds=%g, so rayembed kills its "
            "process %d on node %s, and another process repeats the work item",
            *(unit.name, guard.limit_seconds, process, node[:8]),
        )


def _kill(guard: Guard, unit: Running) -> bool:
    now: list[Running] = ray.get(guard.watch.running.remote(guard.execution))
    if (unit.number, unit.place) not in {(one.number, one.place) for one in now}:
        return False  # it has ended meanwhile, and its process has another one
    try:
        os.kill(unit.place[1], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True

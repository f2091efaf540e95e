"""Units of data work that run now, as the processes that run them tell, and how many a task takes.

A process that hangs tells nothing more, so its unit grows old. Whoever runs units ends such a
process; the unit is then run by another one.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
    """A unit that runs."""

    number: int
    """Place among the units of the execution."""
    name: str
    """Key, and the file that it reads where it is of one."""
    place: Place
    seconds: float
    """Age in seconds."""
    share: float = 0.0
    """How much of it is done, as far as its process tells."""


class Watch:
    """Units of all executions that run now, each with the process that runs it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, dict[Place, tuple[int, str, float]]] = {}
        self._shares: dict[tuple[str, Place], float] = {}
        self._late: Counter[tuple[str, int]] = Counter()

    def take(self, execution: str, numbers: list[int], name: str, place: Place) -> list[int]:
        """How often each unit's process was ended since it took too long.

        Args:
            numbers: of the units that a process takes; it begins the first.
            name: of the first.
        """
        self.begin(execution, numbers[0], name, place)
        return [self._late[execution, number] for number in numbers]

    def begin(self, execution: str, number: int, name: str, place: Place) -> None:
        """Note that a process begins a unit, and has ended the one before."""
        running = self._running.setdefault(execution, {})
        # The process that had it before is dead.
        for other in [p for p, (one, _, _) in running.items() if one == number]:
            self.end(execution, other)
        running[place] = number, name, self._clock()
        self._shares.pop((execution, place), None)

    def note(self, execution: str, place: Place, share: float) -> None:
        """Note how much of a process's unit is done."""
        if place in self._running.get(execution, {}):
            self._shares[execution, place] = share

    def end(self, execution: str, place: Place) -> None:
        """Note that a process has ended its units."""
        self._running.get(execution, {}).pop(place, None)
        self._shares.pop((execution, place), None)

    def running(self, execution: str) -> list[Running]:
        """Units that run, the oldest first."""
        now = self._clock()
        found = self._running.get(execution, {})
        units = [
            Running(n, name, place, now - at, self._shares.get((execution, place), 0.0))
            for place, (n, name, at) in found.items()
        ]
        return sorted(units, key=lambda unit: -unit.seconds)

    def count_late(self, execution: str, unit: Running, *, ended: bool) -> None:
        """Note that the process of a unit that took too long is no more.

        Args:
            ended: whether it was alive and has been killed for that.
        """
        self.end(execution, unit.place)
        self._late[execution, unit.number] += ended

    def forget(self, execution: str) -> None:
        """Drop what is known of an execution that is over."""
        for place in self._running.pop(execution, {}):
            self._shares.pop((execution, place), None)
        for key in [key for key in self._late if key[0] == execution]:
            del self._late[key]


def name_of(item: object) -> str:
    """Key of a unit, and the file that it reads where it is of one."""
    key = str(getattr(item, "key", item))
    for holder in (item, getattr(item, "part", None), getattr(item, "piece", None)):
        if isinstance(path := getattr(holder, "path", None), str):
            return f"{key} of {path}"
    return key


def too_late(name: str, seconds: float) -> str:
    """What is told of a unit that exceeded the time limit in every process."""
    return (
        f"the unit {name} took longer than placement.unit_seconds={seconds:g} in each of {TRIES} "
        "processes, which were ended. Look at its file and at the storage that it is on (`py-spy "
        "dump` shows where such a process stands); raise placement.unit_seconds if the unit needs "
        "longer. The same command goes on from the units that are finished"
    )


def next_units(left: int, cpus: int, seconds: float | None) -> tuple[int, int]:
    """Units that are run next at once, and units of each task.

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

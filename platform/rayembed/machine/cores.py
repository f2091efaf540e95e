"""Count the CPU cores that this process may use, and those that are idle now."""

import os
from typing import NamedTuple

from rayembed.errors import ConfigError

_LOOK_SECONDS = 0.25

THREADS_VARIABLE = "RAYEMBED_THREADS"
"""Environment variable that sets the number of threads of `auto`, regardless of the machine's load.
"""


class Threads(NamedTuple):
    """Number of threads to compute with, and the reason for it."""

    number: int
    why: str
    """Reason, as the end of a sentence."""


def num_cores() -> int:
    """Return the number of CPU cores that this process may use.

    Its affinity and its container's limit count, so that a pod of four CPUs on a machine of a
    hundred does not start a hundred threads; `LOKY_MAX_CPU_COUNT` sets fewer.
    """
    from joblib import cpu_count

    return int(cpu_count())


def free_threads(most: int) -> Threads:
    """Choose a number of threads, from 1 to `most`, so that each gets an idle core.

    Threads of a layer wait for each other: where one of them has no core, all are slower than a
    single one. A core counts as busy if the load of the last minute and a look at the present both
    say so: the load still has what ended seconds ago, and the present may be a moment's work.

    Raises:
        ConfigError: `RAYEMBED_THREADS` is no number.
    """
    if named := os.environ.get(THREADS_VARIABLE):
        if not (named.isdecimal() and int(named)):
            raise ConfigError(f"{THREADS_VARIABLE}={named!r} must be a whole number of at least 1")
        return Threads(int(named), f"{THREADS_VARIABLE} says so")
    import psutil

    cores, all_cores = num_cores(), psutil.cpu_count() or 1
    wanted, load = min(most, cores), psutil.getloadavg()[0]
    if round(all_cores - load) >= wanted:
        return Threads(wanted, f"this process has {cores} cores, the load is {load:.1f}")
    busy = min(load, psutil.cpu_percent(_LOOK_SECONDS) / 100 * all_cores)
    number = max(1, min(wanted, round(all_cores - busy)))
    return Threads(
        number,
        f"other processes take {busy:.1f} of this machine's {all_cores} cores (load {load:.1f}), "
        f"and this one may use {cores}",
    )

"""Work that tests send to processes; imports little, as each process imports this."""

import os
import signal
import sys
import time
from contextlib import suppress

import psutil

from rayembed.errors import DataError


def slow_first(item: int) -> tuple[int, int]:
    if item == 0:
        time.sleep(0.5)  # those behind it are ready long before
    return os.getpid(), item


def children() -> list[psutil.Process]:
    """Processes that do work ahead for this one."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "rayembed.machine.ahead" in " ".join(process.cmdline()):
                found.append(process)
    return found


class OwnError(Exception):
    def __init__(self, one: str, other: str) -> None:  # unpickling gives it one argument
        super().__init__(f"{one} and {other}")


def fails(item: int) -> int:
    sys.stdout.write("this stands among no answers\n")
    if item == 3:
        raise DataError("the text '\\u200b' has no tokens")
    if item == 5:
        raise KeyError("no such column")
    if item == 7:
        raise OwnError("this", "that")
    return item


def dies(item: int) -> int:
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def large(item: int) -> bytes:
    return bytes(8 << 20)


def leaves(item: int) -> int:
    if item == 2:
        sys.exit(3)
    if item == 3:
        os._exit(3)
    return item


def _only_where_it_was_made(pid: int) -> "Bound":
    assert pid == os.getpid(), "of another process"
    return Bound()


class Bound:
    """Can be pickled, and made again in its own process alone."""

    def __reduce__(self):
        return _only_where_it_was_made, (os.getpid(),)

    def __call__(self, item: int) -> int:
        return item

"""CPU seconds of a process and of all below it, which Ray's own and its workers are."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

_SAMPLED_SECONDS = 0.25


@dataclass
class Used:
    """CPU seconds by process. What one uses after it was looked at for the last time is missed: a
    quarter of a second at most.
    """

    by_process: dict[psutil.Process, float] = field(default_factory=dict)
    names: dict[psutil.Process, str] = field(default_factory=dict)
    """The last command line of each process; Ray's workers tell there what they do."""
    before: dict[psutil.Process, float] = field(default_factory=dict)

    @property
    def seconds(self):
        """CPU seconds of all of them."""
        return sum(self.by_process.values())

    def look(self, root, without):
        """Note what the processes have used by now, without those of the ids."""
        try:
            every = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in every:
            if process.pid in without:
                continue
            try:
                times, words = process.cpu_times(), process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            total = times.user + times.system
            self.by_process[process] = total - self.before.get(process, 0.0)
            if words and words[0] != "ray::IDLE":
                self.names[process] = " ".join(words)


@contextmanager
def cpu_of_all(root=None, without=()):
    """A `Used` that tells, in the end, of what was used within the block.

    Args:
        root: the process; None: this one.
        without: ids of processes below it that do not count.
    """
    root = root or psutil.Process()
    used, ended = Used(), threading.Event()
    used.look(root, without)
    used.before, used.by_process = used.by_process, {}

    def watch():
        while not ended.wait(_SAMPLED_SECONDS):
            used.look(root, without)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield used
    finally:
        ended.set()
        thread.join()
        used.look(root, without)

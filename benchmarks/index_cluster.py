"""A Ray cluster of two nodes with one CPU each on this machine, for benchmarks of indexes, and the
memory of its processes.
"""

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PLASMA_BYTES = 200_000_000
_SAMPLED_SECONDS = 0.2


class TwoNodes:
    """A head and a second node, whose workers import this checkout; the second may be lost."""

    def __init__(self):
        path = os.pathsep.join([str(ROOT / "platform"), str(ROOT / "benchmarks")])
        os.environ["PYTHONPATH"] = path
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from rayembed.pipeline.run.on_ray import RAY_SETTINGS, keep_loopback_from_proxies

        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        keep_loopback_from_proxies()
        from ray.cluster_utils import Cluster

        # Sockets lie there, whose paths must be short.
        self._disk = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        given = {"num_cpus": 1, "object_store_memory": PLASMA_BYTES, "temp_dir": self._disk.name}
        # A lost node is known in 5 s, not 15.
        head = {"include_dashboard": False, "_system_config": {"health_check_period_ms": 1000}}
        # Its own end at SIGTERM could be asked for in the main thread only.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**given, **head}, shutdown_at_exit=False
        )
        self._given = {"num_cpus": 1, "object_store_memory": PLASMA_BYTES}
        self._coming = []
        self._add_node()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for timer in self._coming:
            timer.join()
        self._cluster.shutdown()
        self._disk.cleanup()

    @property
    def address(self):
        """For `RAY_ADDRESS`."""
        return str(self._cluster.address)

    def _add_node(self):
        self._second = self._cluster.add_node(**self._given)

    def lose_second(self, seconds):
        """SIGKILL for all processes of the second node, as a machine that is lost ends them; after
        so many seconds another one comes.
        """
        raylet = psutil.Process(self._second.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._coming.append(threading.Timer(seconds, self._add_node))
        self._coming[-1].start()


def memory_of(pid):
    """RSS, PSS and USS of a process in MB; PSS counts a shared page by the share of the process,
    USS only its own pages.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    own = values["Private_Clean"] + values["Private_Dirty"]
    return {"RSS": values["Rss"] / 1e3, "PSS": values["Pss"] / 1e3, "USS": own / 1e3}


class Watched:
    """Peak memory of a job's process, and of each worker: a process that it starts, or one of a
    Ray cluster that this process has started.
    """

    def __init__(self, driver):
        self._driver, self._ended = driver, threading.Event()
        self._peaks = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        own, below = psutil.Process(), set()
        while not self._ended.wait(_SAMPLED_SECONDS):
            with contextlib.suppress(psutil.Error):
                driver = psutil.Process(self._driver)
                below = {driver, *driver.children(recursive=True)}
            for process in own.children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError, IndexError):
                    if process in below or process.cmdline()[0].startswith("ray::"):
                        self._note(process.pid, memory_of(process.pid))

    def _note(self, pid, memory):
        before = self._peaks.setdefault(pid, dict.fromkeys(memory, 0.0))
        for name, value in memory.items():
            before[name] = max(before[name], value)

    def peaks(self):
        """Peaks of the driver, and the largest of the workers, in MB."""
        others = [peak for pid, peak in self._peaks.items() if pid != self._driver]
        found = {"driver": self._peaks[self._driver]}
        if others:
            found["worker"] = {name: max(one[name] for one in others) for name in others[0]}
        return found

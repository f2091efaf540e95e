"""What data steps cost, counted instead of timed: files, requests and bytes of storage, peak memory
and CPU seconds of the driver and of a worker, and how each grows with the rows.

`measured(step)` runs a step in a process of its own, its tasks in another. Requests are as object
storage would see them: one for the size of a file that is opened, one for each range that is read,
for each file that is written, listed or looked for.
"""

import io
import math
import multiprocessing
import os
import resource
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.fs

_SAMPLED_SECONDS = 0.005


@dataclass
class Cost:
    """Counts of one step."""

    files: int = 0
    requests: int = 0
    read: int = 0
    written: int = 0
    driver_own: int = 0
    """Peak of the driver's own memory in bytes, above what it had before the step."""
    driver_peak: int = 0
    """The same with pages of files that are mapped, which the system takes back where it must."""
    worker_peak: int = 0
    cpu_seconds: float = 0.0

    def add(self, other):
        for name in ("files", "requests", "read", "written", "cpu_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worker_peak = max(self.worker_peak, other.worker_peak)


class CountedFiles(pyarrow.fs.FileSystemHandler):
    """The local filesystem, counting into a `Cost`."""

    def __init__(self, cost):
        self.cost, self.inner = cost, _LOCAL()

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def get_type_name(self):
        return "counted"

    def normalize_path(self, path):
        return path

    def get_file_info(self, paths):
        self.cost.requests += len(paths)
        return self.inner.get_file_info(paths)

    def get_file_info_selector(self, selector):
        found = self.inner.get_file_info(selector)
        self.cost.requests += max(1, -(-len(found) // 1000))
        return found

    def create_dir(self, path, recursive):
        self.inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path):
        self.inner.delete_dir(path)

    def delete_dir_contents(self, path, missing_dir_ok=False):
        self.inner.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self):
        raise OSError("no step removes all that a storage has")

    def delete_file(self, path):
        self.cost.requests += 1
        self.inner.delete_file(path)

    def move(self, source, target):
        self.inner.move(source, target)

    def copy_file(self, source, target):
        self.inner.copy_file(source, target)

    def open_input_file(self, path):
        return self._open(path)

    def open_input_stream(self, path):
        return self._open(path)

    def open_output_stream(self, path, metadata):
        self.cost.files += 1
        return self.inner.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path, metadata):
        return self.inner.open_append_stream(path, metadata=metadata)

    def _open(self, path):
        self.cost.requests += 1
        return pa.PythonFile(_CountedFile(path, self.cost), mode="r")


class _CountedFile:
    def __init__(self, path, cost):
        self.file, self.cost, self.closed = io.FileIO(path), cost, False

    def read(self, size=-1):
        found = self.file.read(size)
        self.cost.requests += 1
        self.cost.read += len(found)
        return found

    def seek(self, place, whence=0):
        return self.file.seek(place, whence)

    def tell(self):
        return self.file.tell()

    def readable(self):
        return True

    def seekable(self):
        return True

    def writable(self):
        return False

    def close(self):
        self.closed = True
        self.file.close()

    def flush(self):
        pass


_LOCAL = pyarrow.fs.LocalFileSystem


@contextmanager
def counted():
    """A `Cost` into which this process's files are counted."""
    from rayembed.assets import storage

    cost, beside = Cost(), storage.write_beside

    def write(target, content):
        beside(target, content)
        cost.files += 1
        cost.requests += 1
        cost.written += target.stat().st_size

    filesystem = pyarrow.fs.PyFileSystem(CountedFiles(cost))
    with (
        mock.patch.object(pyarrow.fs, "LocalFileSystem", return_value=filesystem),
        mock.patch.object(storage, "write_beside", write),
    ):
        yield cost


def status(name):
    """A size in bytes of this process, as the system tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def start_of_peak():
    """Bytes that the process has, from which its peak (`VmHWM`) counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


@contextmanager
def own_peak():
    """A list that holds the peak of this process's own memory in the end, in bytes, above the
    beginning; what is shorter than some milliseconds is missed.
    """
    before, ended, peak = status("RssAnon"), threading.Event(), [0]

    def look():
        while not ended.wait(_SAMPLED_SECONDS):
            peak[0] = max(peak[0], status("RssAnon") - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak[0] = max(peak[0], status("RssAnon") - before)


def _cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _in_worker(setup, task, item):
    if setup is not None:
        setup()
    with counted() as cost:
        before, cpu = start_of_peak(), _cpu()
        result = task(item)
        cost.worker_peak, cost.cpu_seconds = status("VmHWM") - before, _cpu() - cpu
    return result, cost


def _in_driver(step, arguments, setup):
    if setup is not None:
        setup()
    context = multiprocessing.get_context("fork")
    tasks = Cost()
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(_import_all).result()  # the worker is there before any thread of this process

        def execute(task, items, needs="cpu"):
            for item in items:
                result, cost = pool.submit(_in_worker, setup, task, item).result()
                tasks.add(cost)
                yield result

        with counted() as cost, own_peak() as own:
            before, cpu = start_of_peak(), _cpu()
            told = step(*arguments, execute)
            cost.driver_peak, cost.cpu_seconds = status("VmHWM") - before, _cpu() - cpu
    cost.driver_own = own[0]
    cost.add(tasks)
    return told, cost


def _import_all():
    import rayembed.data.plan.write
    import rayembed.data.sources.convert  # noqa: F401


def measured(step, *arguments, setup=None):
    """What a step gives and its `Cost`: a function at the top of a module, which is called with the
    arguments and an `Execute`, in a process of its own: a copy of this one, which has imported
    what the steps need and done nothing with it.

    Args:
        setup: called in each process first.
    """
    _import_all()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_in_driver, step, arguments, setup).result()


UNITS = {
    "files": ("files", 1),
    "requests": ("requests", 1),
    "read": ("MB read", 1e6),
    "written": ("MB written", 1e6),
    "driver_own": ("driver MB", 1e6),
    "driver_peak": ("with mapped MB", 1e6),
    "worker_peak": ("worker MB", 1e6),
    "cpu_seconds": ("CPU s", 1),
}


def table(costs):
    """A table of steps: name → rows → `Cost`."""
    names = [field.name for field in fields(Cost)]
    lines = [
        "| step | rows | " + " | ".join(UNITS[name][0] for name in names) + " |",
        "|---|---:|" + "---:|" * len(names),
    ]
    for step, by_rows in costs.items():
        for rows, cost in by_rows.items():
            values = (_shown(getattr(cost, name) / UNITS[name][1]) for name in names)
            lines.append(f"| {step} | {rows:,} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def _shown(value):
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def exponents(costs, allowed=0.1):
    """A table of the slopes between the two largest sizes of each step in log-log, and a line for
    each that grows faster than n·log n by more than `allowed`.
    """
    names = [field.name for field in fields(Cost)]
    lines = [
        "| exponent of | from | " + " | ".join(UNITS[name][0] for name in names) + " |",
        "|---|---:|" + "---:|" * len(names),
    ]
    faster = []
    for step, by_rows in costs.items():
        if len(by_rows) < 2:
            continue
        (few, small), (many, large) = list(by_rows.items())[-2:]
        limit = math.log(many * math.log(many) / (few * math.log(few))) / math.log(many / few)
        shown = []
        for name in names:
            slope = _slope(few, getattr(small, name), many, getattr(large, name))
            shown.append("" if slope is None else f"{slope:.2f}")
            if slope is not None and slope > limit + allowed:
                faster.append(f"{step}: {UNITS[name][0]} by {slope:.2f} (n·log n: {limit:.2f})")
        lines.append(f"| {step} | {few:,} to {many:,} | " + " | ".join(shown) + " |")
    found = "; ".join(faster) or "nothing"
    return "\n".join([*lines, "", f"Grows faster than n·log n between these sizes: {found}."])


def _slope(few, small, many, large):
    if small <= 0 or large <= 0:
        return None
    return math.log(large / small) / math.log(many / few)


def machine():
    """The CPU's name, its number of cores and the load."""
    from rayembed.registry.provenance import cpu_summary

    return f"{cpu_summary()}, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"


def as_json(costs):
    """The costs as plain values."""
    return {
        step: {str(rows): asdict(cost) for rows, cost in by_rows.items()}
        for step, by_rows in costs.items()
    }

"""Jobs of the whole-job benchmark as processes: commands, files, ends, memory of the GPU."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
BEGAN = time.monotonic()
ENDING = threading.Event()
"""Set by a signal: whoever waits for a job kills it."""


@dataclass(frozen=True)
class Case:
    """A model and the settings of its jobs."""

    name: str
    job: str
    shape: Mapping[str, Any]
    settings: Mapping[str, Any]
    rate: float
    compared_layers: int | None
    """Layers of the jobs that are compared; None: all."""
    pairs: int
    """Of a step."""
    longest: int
    """Words of a document."""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


@dataclass(frozen=True)
class Task:
    """One job: its script, its settings, and where its files lie."""

    name: str
    told: str
    case: Case
    settings: Mapping[str, Any]
    outputs: Path
    limit: float

    @property
    def run(self) -> Path:
        return self.outputs / "runs" / self.name

    @property
    def command(self) -> list[str]:
        script = str(ROOT / "jobs" / f"{self.case.job}.py")
        given = {**self.settings, "placement.storage_path": self.outputs}
        sets = [word for k, v in given.items() for word in ("--set", f"{k}={_value(v)}")]
        return [sys.executable, script, "--recipe", "biencoder", "--name", self.name, *sets]

    def steps(self) -> list[dict[str, Any]]:
        """What the run's log says of each step."""
        log = self.run / "metrics.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        return {int(step["step"]): float(step["loss"]) for step in self.steps()}

    def scores(self) -> dict[str, float]:
        """Model → held-out nDCG@10."""
        with (self.run / "scores.csv").open(encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        return {name: float(score) for name, score, *_ in rows}


def _value(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


class Job:
    """A job as a process that leads a session of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.log = task.outputs.parent / f"{task.outputs.name}.log"
        self.began = time.monotonic()
        self.ended: float | None = None
        paths = [str(ROOT / "platform"), os.environ.get("PYTHONPATH", "")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                task.command,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        say(f"{task.told}: started")

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End the job and all that it started, without a warning."""
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for child in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(tree, timeout=10)
        self.process.wait()

    def wait(self, done: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the job ends or something else has happened; whether it ended well.

        One that outlasts its limit is killed.
        """
        try:
            while self.process.poll() is None and not done():
                if ENDING.is_set():
                    raise SystemExit("interrupted")
                if self.seconds > self.task.limit:
                    self.kill()
                    say(f"{self.task.told}: killed after {self.seconds:.0f} s, its limit")
                    return False
                time.sleep(0.02)
        except BaseException:
            self.kill()
            raise
        self.ended = time.monotonic()
        return self.process.poll() == 0

    def tell_end(self, well: bool) -> None:
        if well:
            say(f"{self.task.told}: done in {self.seconds:.0f} s")
            return
        say(f"{self.task.told}: FAILED, exit code {self.process.poll()}; its log ends:")
        print(self.text()[-4000:], flush=True)


class MemoryWatch:
    """Most memory of the GPU that was taken while the block ran, by all processes."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._end = threading.Event()
        self.most = 0.0

    def __enter__(self) -> "MemoryWatch":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while self._on and not self._end.wait(0.5):
            try:
                told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
                self.most = max(self.most, int(told) * 2**20 / 1e9)
            except (OSError, ValueError, subprocess.CalledProcessError):
                return

    @property
    def told(self) -> str:
        return f"{self.most:.1f}" if self.most else "–"


def done_alone(task: Task) -> Job | None:
    """The job after its end; None if it failed."""
    job = Job(task)
    well = job.wait()
    job.tell_end(well)
    return job if well else None


def done_at_once(tasks: Sequence[Task], at_once: int) -> dict[str, float]:
    """Name → seconds of each job. Those that fail beside others are done again alone.

    Raises:
        SystemExit: one fails alone too.
    """
    taken = {}
    with ThreadPoolExecutor(at_once) as pool:
        ended = list(pool.map(done_alone, tasks))
    for task, first in zip(tasks, ended, strict=True):
        job = first or (done_alone(task) if at_once > 1 else None)
        if job is None:
            raise SystemExit(f"{task.told} failed")
        taken[task.name] = job.seconds
    return taken

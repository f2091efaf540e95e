"""What a fault is thrown at: a Ray cluster of its own, a run of its own, its job and its steps."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from networks import BRIDGE, DEVICE_OF_GLOO, HEAD, Cables, plugged
from tiny_job import ROOT
from tiny_models import save_decoder

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.pipeline.run.on_ray import free_port
from rayembed.registry.metrics_log import METRICS_FILE, LogReader

NAME, STAGE = "drill", "only"
STEPS, CHECKPOINT_EVERY, WORKERS = 24, 4, 2
ROWS = 8
"""Of a global batch; the plan is one pass over the data."""

FAULT_AT = 10
"""Step at which a fault is thrown: between the checkpoints of steps 8 and 12."""

SECONDS = 240
"""For what takes some, on a machine with nothing else to do."""

PLASMA = 200_000_000


class UnexpectedError(Exception):
    """The platform did not do what the drill waits for; tells what was seen instead."""


def write_inputs(folder: Path) -> Path:
    """The run's YAML, beside the backbone and the rows that it names."""
    if not folder.exists():
        folder.mkdir(parents=True)
        save_decoder(folder / "backbone")
        write_rows(folder)
    run = parse(
        Run,
        {
            "name": NAME,
            "model": {
                "kind": "nvembed",
                # fp32 and a fixed number of workers: weights can be compared bit for bit.
                "backbone": {"path": str(folder / "backbone"), "dtype": "float32"},
                "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
                "lora": {"rank": 2, "alpha": 4, "dropout": 0.1},
                "query_max_length": 48,
                "document_max_length": 48,
            },
            "data": {
                "datasets": [
                    {
                        "name": "rows",
                        "source": {"kind": "pairs", "path": str(folder / "rows.jsonl")},
                        "query_instruction": "find",
                    }
                ],
            },
            "stages": [
                {
                    "name": STAGE,
                    "datasets": {"rows": 1},
                    "batch": {
                        "global_pairs": ROWS,
                        "num_negatives": 0,
                        "in_batch_negatives": True,
                    },
                    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
                    "steps": STEPS,
                    "checkpoint_every_steps": CHECKPOINT_EVERY,
                }
            ],
            "evaluation": {"benchmarks": []},
            "placement": {
                "workers": WORKERS,
                "cpus_per_worker": 1,
                "zero_stage": 2,
                "micro_batch_tokens": 64,
            },
        },
    )
    path = folder / "run.yaml"
    path.write_text(run.to_yaml())
    return path


def write_rows(folder: Path, *, poisoned: int = 0) -> None:
    """The rows of the run, with so many among them that have no positive."""
    lines = [
        json.dumps({"query": f"what is said of own{i}", "positive": f"of own{i} this is said"})
        for i in range(STEPS * ROWS)
    ]
    middle = len(lines) // 2
    lines[middle:middle] = [json.dumps({"query": f"poisoned {i}"}) for i in range(poisoned)]
    (folder / "rows.jsonl").write_text("\n".join(lines))


class Nodes:
    """A Ray cluster on this machine, of nodes with so many CPUs each; the first is the head.

    Args:
        cables: what the other nodes are plugged into; None: all share this machine's network.
        free_bytes: of memory, without which Ray kills a worker, fewer than there are now by so
            many; None: Ray's own limit.
        apart: each node has a folder of its own for its cache and Ray's files, as on its own disk.
    """

    def __init__(
        self,
        cpus: Sequence[int],
        plasma_bytes: int,
        *,
        cables: "Cables | None" = None,
        free_bytes: int | None = None,
        apart: bool = False,
    ) -> None:
        from ray.cluster_utils import Cluster

        # Sockets lie there, whose paths must be short.
        self._disks = Path(tempfile.mkdtemp(prefix="disks-")) if apart else None
        port = free_port()
        head: dict[str, Any] = self._own_disk(0)
        if cables is not None:
            head["node_ip_address"] = HEAD
            os.environ[DEVICE_OF_GLOO] = BRIDGE
        if free_bytes is not None:
            memory = psutil.virtual_memory()
            self.least_available = memory.available - free_bytes
            share = 1 - self.least_available / memory.total
            head["_system_config"] = {"memory_usage_threshold": share}
        # Train's cleaner asks there whether its controller lives; all processes inherit this.
        os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cpus[0],
                "object_store_memory": plasma_bytes,
                "include_dashboard": True,
                "dashboard_port": port,
                **head,
            },
        )
        self._nodes = [self._cluster.head_node]
        self._cables, self._addresses = cables, [""]
        for number in cpus[1:]:
            self.add_node(number, plasma_bytes)

    def add_node(self, cpus: int, plasma_bytes: int) -> None:
        """Another node, as a cloud sends one for one that was lost."""
        given: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": plasma_bytes}
        given |= self._own_disk(len(self._nodes))
        if self._cables is None:
            self._nodes.append(self._cluster.add_node(**given))
            return
        self._addresses.append(self._cables.plug_in())
        with self._cables.inside(self._addresses[-1]):
            node = self._cluster.add_node(node_ip_address=self._addresses[-1], **given)
        self._nodes.append(node)

    def disk(self, number: int) -> Path:
        """Folder of a node that is apart."""
        assert self._disks is not None
        return self._disks / str(number)

    def _own_disk(self, number: int) -> dict[str, Any]:
        if self._disks is None:
            return {}
        os.environ["RAYEMBED_CACHE"] = str(self.disk(number) / "cache")
        return {"temp_dir": str(self.disk(number) / "ray")}

    @property
    def address(self) -> str:
        """For `RAY_ADDRESS`."""
        return str(self._cluster.address)

    @property
    def jobs_address(self) -> str:
        """For `ray job submit`."""
        return os.environ["RAY_API_SERVER_ADDRESS"]

    @property
    def spilled_bytes(self) -> int:
        """What lies on disk because the object store of the head was full."""
        session = Path(self._cluster.head_node.get_session_dir_path())
        files = [path for path in session.glob("ray_spilled_objects*/*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    def processes(self, title: str, node: int | None = None) -> list[psutil.Process]:
        """Ray's workers of that title, the oldest first; `node`: of that node alone."""
        found = []
        for number, raylet in enumerate(self._raylets()):
            if raylet is None or node not in (None, number):
                continue
            for process in raylet.children(recursive=True):
                try:
                    if title in " ".join(process.cmdline()):
                        found.append(process)
                except psutil.Error:
                    continue
        return sorted(found, key=lambda process: process.create_time())

    def kill_node(self, number: int) -> None:
        """SIGKILL for all processes of a node, as a machine that is lost ends them."""
        raylet = self._raylets()[number]
        assert raylet is not None
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def cut_off(self, number: int) -> None:
        """Pull the node's cable; its processes live on."""
        assert self._cables is not None
        self._cables.cut(self._addresses[number])

    def kill_head(self) -> None:
        """SIGKILL for all processes of the head, its store of the cluster's state among them."""
        raylet = self._raylets()[0]
        assert raylet is not None
        left = [psutil.Process(info.process.pid) for info in self._head_processes()]
        for process in [*left, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _head_processes(self) -> list[Any]:
        return [one for several in self._nodes[0].all_processes.values() for one in several]

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()
        if self._disks is not None:
            shutil.rmtree(self._disks, ignore_errors=True)

    def _raylets(self) -> list[psutil.Process | None]:
        found: list[psutil.Process | None] = []
        for node in self._nodes:
            process = node.all_processes["raylet"][0].process
            found.append(psutil.Process(process.pid) if process.poll() is None else None)
        return found


class StepsSeen(threading.Thread):
    """Every record that ever stood in a metrics log, also of steps that were done again later.

    Steps that are done again replace their records only when workers have been started anew,
    which takes seconds, so that a look every few milliseconds misses none.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._reader = LogReader(path)
        self._seen: set[tuple[int, float]] = set()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self._look()

    def _look(self) -> None:
        self._seen |= {(r["global_step"], r["time"]) for r in self._reader.read()}

    def last(self) -> int:
        """The highest step so far."""
        return max((step for step, _ in set(self._seen)), default=0)

    def repeated(self) -> int:
        """Steps that were done beyond the first time each; ends the looking."""
        self._ended.set()
        self.join()
        self._look()
        return len(self._seen) - len({step for step, _ in self._seen})


class Job:
    """The process of a submitted job, and what a user sees of it."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "jobs/train_nvembed.py", *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def text(self) -> str:
        """All that it has printed."""
        return self._log.read_text(errors="replace")

    def line(self, pattern: str) -> str:
        """The first printed line that has the pattern, without colours."""
        lines = re.sub(r"\x1b\[[\d;]*m", "", self.text()).splitlines()
        found = next((line for line in lines if re.search(pattern, line)), None)
        if found is None:
            raise UnexpectedError(f"no line with {pattern!r}:\n{self.text()[-3000:]}")
        return found

    def last_line(self) -> str:
        """The last printed line that is not empty."""
        return [line for line in self.text().splitlines() if line.strip()][-1]

    def ends_in_failure(self) -> None:
        """Return when it has ended with any code but 0."""
        if self.process.wait(SECONDS) == 0:
            raise UnexpectedError(f"it ended well:\n{self.text()[-3000:]}")

    def ends_with(self, code: int) -> None:
        """Return when it has ended so."""
        found = self.process.wait(SECONDS)
        if found != code:
            raise UnexpectedError(f"exit code {found} instead of {code}:\n{self.text()[-3000:]}")


@dataclass
class Scene:
    """A run in a storage of its own on a cluster of its own."""

    folder: Path
    run_file: Path
    nodes: Nodes
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = StepsSeen(self.run_folder / METRICS_FILE)

    @property
    def storage(self) -> Path:
        """`placement.storage_path`."""
        return self.folder / "outputs"

    @property
    def run_folder(self) -> Path:
        """Of the run, in storage."""
        return self.storage / "runs" / NAME

    @property
    def checkpoints(self) -> Path:
        """Folder of the stage's checkpoints."""
        return self.run_folder / STAGE / "train"

    def submit(self, *assignments: str, **environment: str) -> Job:
        """The run's job, started."""
        given = [f"placement.storage_path={self.storage}", *assignments]
        arguments = ["--recipe", str(self.run_file)]
        arguments += [word for assignment in given for word in ("--set", assignment)]
        values = {
            "RAY_ADDRESS": self.nodes.address,
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            **environment,
        }
        self.jobs.append(Job(arguments, values, self.folder / f"job{len(self.jobs)}.log"))
        return self.jobs[-1]

    def wait_for_step(self, step: int, job: Job) -> None:
        """Return when the metrics log has the step."""
        self.wait_for(lambda: self.steps.last() >= step, job, f"step {step}")

    def wait_for(self, condition: Callable[[], Any], job: Job, what: str) -> None:
        """Return when it is so, while the job runs."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            if job.process.poll() is not None:
                raise UnexpectedError(f"the job ended before {what}:\n{job.text()[-3000:]}")
            if time.monotonic() > deadline:
                raise UnexpectedError(f"no {what} in {SECONDS} s:\n{job.text()[-3000:]}")
            time.sleep(0.02)

    def new_cluster(self) -> None:
        """Another cluster in place of the one that was, as a RayJob gets for each try."""
        self.nodes.close()
        self.nodes = Nodes((WORKERS,), PLASMA)

    def kill_driver(self, job: Job) -> None:
        """SIGKILL for the job's driver; returns when Train's controller has gone with it."""
        job.process.kill()
        job.process.wait()
        deadline = time.monotonic() + SECONDS
        while self.nodes.processes("ray::TrainController"):
            if time.monotonic() > deadline:
                raise UnexpectedError(f"the controller lives {SECONDS} s without its driver")
            time.sleep(0.1)

    def close(self) -> None:
        """End what still runs."""
        for job in self.jobs:
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()
        self.nodes.close()


@contextmanager
def scene(
    folder: Path,
    run_file: Path,
    *,
    cpus: Sequence[int] = (WORKERS,),
    plasma_bytes: int = PLASMA,
    cables: bool = False,
    free_bytes: int | None = None,
) -> Iterator[Scene]:
    """A scene in a new folder, whose processes are gone afterwards.

    Raises:
        SkippedError: nodes shall have `cables`, and this machine has none to give.
    """
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        plugs = stack.enter_context(plugged()) if cables else None
        nodes = Nodes(cpus, plasma_bytes, cables=plugs, free_bytes=free_bytes)
        made = Scene(folder, run_file, nodes)
        stack.callback(made.close)
        yield made

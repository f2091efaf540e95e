"""A second node of a Ray cluster, on this machine; it can be lost like a machine that is gone."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray._common.utils import get_ray_address_file

from rayembed.training.faults.drain_node import drain, trains

RAY = (sys.executable, "-m", "ray.scripts.scripts")
SECONDS = 60
"""For what takes a few, on a machine with nothing else to do."""


class SecondNode:
    """`ray start` of a node and all that it started."""

    def __init__(self, address: str, num_cpus: int, num_gpus: int = 0) -> None:
        self._address, before = address, set(ray._private.state.available_resources_per_node())
        # Workers' ports may be any: the usual ones are those of the first node.
        command = [*RAY, "start", f"--address={address}"]
        command += [f"--num-cpus={num_cpus}", "--object-store-memory=150000000", "--block"]
        command += [f"--num-gpus={num_gpus}"] if num_gpus else []
        command += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        deadline = time.monotonic() + SECONDS
        self._id: str | None = None
        while self._id is None:
            self._id = self._new(before, num_cpus)
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, "the node did not come"
            time.sleep(0.1)

    def _new(self, before: set[str], num_cpus: int) -> str | None:
        nodes = ray._private.state.available_resources_per_node()
        free = (key for key, node in nodes.items() if node.get("CPU") == num_cpus)
        return next((key for key in free if key not in before), None)

    def announce_its_end(self, seconds: int) -> None:
        """As a cloud announces that it takes a spot node away."""
        with tempfile.TemporaryDirectory() as proc:
            # The processes of this node alone, as a pod or a machine of its own has them.
            above = psutil.Process(self._process.pid)
            for process in [above, *above.children(recursive=True)]:
                (Path(proc) / str(process.pid)).symlink_to(f"/proc/{process.pid}")
            assert trains(Path(proc)), "no worker of a training is found on the node"
            assert drain(seconds, Path(proc))

    def lose(self) -> None:
        """Kill raylet, agents and workers at once; nobody takes leave."""
        if self._process.poll() is None:
            above = psutil.Process(self._process.pid)
            for process in [above, *above.children(recursive=True)]:
                process.kill()
            self._process.communicate()


@contextmanager
def second_node(address: str, num_cpus: int, num_gpus: int = 0) -> Iterator[SecondNode]:
    """A node in the cluster at the address, which is lost in the end if it is still there."""
    with _usual_address_kept():
        node = SecondNode(address, num_cpus, num_gpus)
        try:
            yield node
        finally:
            node.lose()


@contextmanager
def _usual_address_kept() -> Iterator[None]:
    """`ray start` writes down which cluster others on this machine find: not that of a test."""
    file = Path(get_ray_address_file(None))
    usual = file.read_bytes() if file.exists() else None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        if usual is not None:
            file.write_bytes(usual)

"""A data job on object storage of which a fifth of the requests fail and some hang, while a process
or a node is lost in each of its steps: it ends with the files that it has in peace.
"""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from data_job import prepared, write_inputs
from s3_server import BUCKET
from scene import PLASMA, Nodes
from unreliable_s3 import Held, UnreliableS3, unreliable_s3

import rayembed
from rayembed.pipeline.local_head import RAY_SETTINGS

pytestmark = [pytest.mark.job, pytest.mark.ray]

STEPS = (
    "data/records/",
    "data/held_out/",
    "data/documents/",
    "data/filtered/",
    "data/vectors/",
    "data/mined/",
    "data/clustered/",
    "plans/",
)
"""Folders of what the steps of the job make."""


class Driver:
    """The job's process, which is started again whenever the storage or a fault ended it."""

    def __init__(self, inputs: Path, storage: str, folder: Path) -> None:
        self.records, self._folder, self.starts = folder / "records.txt", folder, 0
        self._command = [sys.executable, "-m", "data_job_on_ray", inputs, storage, self.records]

    def start(self) -> None:
        """Submit the job (again)."""
        self.starts += 1
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        """What the last start printed."""
        return self._folder / f"{self.starts}.log"


def worker_killed(held: Held, driver: Driver, nodes: Nodes) -> None:
    """The process that uploads is killed, be it a worker or the driver."""
    held.process.kill()


def node_lost(held: Held, driver: Driver, nodes: Nodes) -> None:
    """All workers are lost at once, and a new node comes."""
    nodes.kill_node(-1)
    nodes.add_node(2, PLASMA)


def driver_killed(held: Held, driver: Driver, nodes: Nodes) -> None:
    """The driver is killed, whoever uploads."""
    driver.process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The job's inputs, all files that it leaves, and its records as text."""
    inputs, storage = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    write_inputs(inputs)
    records = prepared(inputs, storage)
    files = {str(p.relative_to(storage)): p.read_bytes() for p in storage.rglob("*") if p.is_file()}
    return inputs, without_times(files), repr(records)


def without_times(files: dict[str, bytes]) -> dict[str, Any]:
    """Contents of files, those of manifests without the seconds that they tell."""
    found: dict[str, Any] = dict(files)
    for name, content in files.items():
        if name.endswith("manifest.json"):
            found[name] = {**json.loads(content), "seconds": 0, "digest": ""}
    # The page shows the manifest, and local disks alone have locks.
    unlike = ("audit.html", ".lock")
    return {name: content for name, content in found.items() if not name.endswith(unlike)}


def objects(storage: UnreliableS3, folder: str) -> dict[str, bytes]:
    """Contents of all objects in a folder of the bucket."""
    storage.reliable = True
    filesystem = pyarrow.fs.S3FileSystem(
        access_key=storage.environment["AWS_ACCESS_KEY_ID"],
        secret_key=storage.environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_override=storage.environment["AWS_ENDPOINT_URL"],
        region="us-east-1",
    )
    root = f"{BUCKET}/{folder}"
    files = filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
    found = {
        info.path.removeprefix(f"{root}/"): filesystem.open_input_file(info.path).read()
        for info in files
        if info.is_file
    }
    storage.reliable = False
    return found


@pytest.mark.slow("three whole data jobs, each disturbed eight times, on storage that fails")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fault", [worker_killed, node_lost, driver_killed])
def test_faults_in_every_step_on_failing_storage_change_no_file(
    fault: Callable[[Held, Driver, Nodes], None],
    undisturbed: tuple[Path, dict[str, Any], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    inputs, files, records = undisturbed
    folder = fault.__name__  # all servers of this process have the same buckets
    path = [os.environ["TESTS_SUPPORT"], str(Path(rayembed.__file__).parents[1])]
    with unreliable_s3(failing=0.2, hanging=0.005) as storage:
        for name, value in {**storage.environment, **RAY_SETTINGS}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        # All tasks run on the second node, and the driver on the first.
        nodes = Nodes((0, 2), PLASMA)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        driver = Driver(inputs, f"s3://{BUCKET}/{folder}", tmp_path)
        try:
            thrown = disturbed(driver, storage, folder, fault, nodes)
        finally:
            driver.process.kill()
            nodes.close()
        record_property("told", f"{driver.starts} starts, requests {dict(storage.seen)}")
        assert sorted(thrown) == sorted(f"/{BUCKET}/{folder}/{step}" for step in STEPS)
        assert storage.seen["failed"] > 100
        assert storage.seen["hung"] > 0
        assert driver.records.read_text() == records
        left = without_times(objects(storage, folder))
        assert sorted(left) == sorted(files)
        assert [name for name in files if left[name] != files[name]] == []


def disturbed(
    driver: Driver,
    storage: UnreliableS3,
    folder: str,
    fault: Callable[[Held, Driver, Nodes], None],
    nodes: Nodes,
) -> list[str]:
    """Run the job to its end, with the fault at the second upload of each step.

    Returns:
        The steps in which it was thrown.
    """
    storage.hold(f"{folder}/{step}" for step in STEPS)
    thrown = []
    driver.start()
    while (code := driver.process.poll()) != 0:
        if code is not None:
            told = driver.log.read_text()
            assert code == -9 or "StorageError" in told.splitlines()[-1], told[-3000:]
            assert driver.starts < 60, "the job does not come to its end"
            driver.start()
        try:
            held = storage.held.get(timeout=0.1)
        except queue.Empty:
            continue
        thrown.append(held.prefix)
        fault(held, driver, nodes)
        held.go_on.set()
    return thrown

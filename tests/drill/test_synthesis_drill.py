"""A data job with every step that there is, on object storage of which a fifth of the requests fail
and some hang, as do those to its language model, while a process or a node is lost in each of its
steps: it ends with the files that it has in peace.
"""

import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from chat_server import chat_server
from every_step import ANSWERS, Writer, compared, contents, everything, write_inputs
from s3_server import BUCKET
from scene import PLASMA, Nodes
from unreliable_s3 import Held, UnreliableS3, unreliable_s3

import rayembed
from rayembed.pipeline.run.on_ray import RAY_SETTINGS

pytestmark = [pytest.mark.job, pytest.mark.ray]

STEPS = (
    "data/synthetic/written-",
    "data/records/",
    "data/held_out/",
    "data/documents/",
    "data/filtered/",
    "data/vectors/",
    "data/mined/own-",
    "data/mined/classes-",
    "data/mined/written-",
    "data/repaired/own-",
    "data/repaired/written-",
    "data/clustered/",
    "data/teacher_vectors/",
    "plans/first-",
    "data/sequences/",
    "plans/adapt-",
    "data/synthetic/made-",
)
"""Beginnings of the folders that the steps of the job make, beside those of answers."""

FAILING, HANGING = 0.2, 0.005
"""Shares of requests to the storage."""

TOO_LATE = 0.05
"""Share of answers of the language model that come when nobody waits any more."""


class Driver:
    """The job's process, which is started again whenever the storage or a fault ended it."""

    def __init__(self, inputs: Path, storage: str, model: str, folder: Path) -> None:
        self.result, self._folder, self.starts = folder / "result.txt", folder, 0
        command = [sys.executable, "-m", "every_step_on_ray", inputs, storage, model, self.result]
        self._command = [str(word) for word in command]

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


@dataclass
class Peace:
    """The job's inputs, and what it leaves where nothing is disturbed."""

    inputs: Path
    model: str
    """Address of the language model."""
    writer: Writer
    files: dict[str, Any]
    """Path → content of all files that are compared."""
    answers: list[str]
    """Folders of a language model's answers."""
    result: str


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peace]:
    """The job in one process on a local disk."""
    inputs, storage = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    write_inputs(inputs)
    writer = Writer()
    with chat_server(reply=writer) as model:
        result = everything(inputs, str(storage), model.url)
        files = contents(storage)
        answers = sorted({found[0] for name in files if (found := ANSWERS.match(name))})
        yield Peace(inputs, model.url, writer, files, answers, repr(result))


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


@pytest.mark.slow("three whole data jobs, each disturbed in every step, on storage that fails")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fault", [worker_killed, node_lost, driver_killed])
def test_faults_in_every_step_on_failing_storage_change_no_file(
    fault: Callable[[Held, Driver, Nodes], None],
    peace: Peace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    assert [n for n in peace.files if not n.startswith((*STEPS, *peace.answers))] == []
    folder = fault.__name__  # all servers of this process have the same buckets
    path = [os.environ["TESTS_SUPPORT"], str(Path(rayembed.__file__).parents[1])]
    peace.writer.failing, peace.writer.hanging = FAILING, TOO_LATE
    peace.writer.seen.clear()
    # A step that asks may store all answers at once.
    faults = dict.fromkeys(STEPS, 1) | dict.fromkeys(peace.answers, 0)
    with unreliable_s3(failing=FAILING, hanging=HANGING) as storage:
        for name, value in {**storage.environment, **RAY_SETTINGS}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        # All tasks run on the second node, and the driver on the first.
        nodes = Nodes((0, 2), PLASMA)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        driver = Driver(peace.inputs, f"s3://{BUCKET}/{folder}", peace.model, tmp_path)
        storage.hold({f"{folder}/{step}": count for step, count in faults.items()})
        try:
            thrown = disturbed(driver, storage, fault, nodes)
        finally:
            driver.process.kill()
            nodes.close()
            seen = f"requests {dict(storage.seen)}, of the model {dict(peace.writer.seen)}"
            record_property("told", f"{driver.starts} starts, {seen}")
        assert sorted(thrown) == sorted(f"/{BUCKET}/{folder}/{step}" for step in faults)
        assert storage.seen["failed"] > 100
        assert storage.seen["hung"] > 0
        assert driver.result.read_text() == peace.result
        left = compared(objects(storage, folder))
        assert sorted(left) == sorted(peace.files)
        assert [name for name in peace.files if left[name] != peace.files[name]] == []


def disturbed(
    driver: Driver,
    storage: UnreliableS3,
    fault: Callable[[Held, Driver, Nodes], None],
    nodes: Nodes,
) -> list[str]:
    """Run the job to its end, with the fault at each upload that is held.

    Returns:
        The steps in which it was thrown.
    """
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

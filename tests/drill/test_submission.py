"""A job that is submitted from a laptop to nodes that share nothing but object storage and MLflow.

Each node has a network, an address and caches of its own. The laptop's folder is a checkout, and it
knows neither the nodes' storage nor its credentials: only Ray's command line and the token. Its
Python may be another one, named by the variable `LAPTOP_PYTHON`: of an environment that has
`ray[default]` and nothing else.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pyarrow.fs
import pytest
from mlflow_server import MlflowServer
from networks import HEAD, SkippedError, plugged
from s3_server import BUCKET, s3_server
from scene import PLASMA, SECONDS, Nodes
from tiny_job import ROOT, write_inputs

from rayembed.pipeline.run.on_ray import RAY_SETTINGS
from rayembed.registry.metrics_log import METRICS_FILE
from rayembed.training.checkpoints.checkpoint_list import checkpoint_name

pytestmark = [pytest.mark.job, pytest.mark.ray]

STEPS, CHECKPOINT_EVERY = 300, 10


class Laptop:
    """A checkout in a folder of its own, and Ray's command line with a token."""

    def __init__(self, folder: Path, address: str) -> None:
        self.checkout, self._address = folder / "checkout", address
        for name in ("platform", "jobs", "cluster"):
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, self.checkout / name, ignore=unwanted)
        for name in (".rayignore", ".gitignore"):
            shutil.copy(ROOT / name, self.checkout)
        self.token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])

    def ray_job(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """`ray job VERB` at the cluster's address, with nothing else in its environment."""
        ray = (os.environ.get("LAPTOP_PYTHON", sys.executable), "-m", "ray.scripts.scripts")
        return subprocess.run(
            [*ray, "job", verb, f"--address={self._address}", *words],
            cwd=self.checkout,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.checkout.parent),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self.token),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * SECONDS,
        )

    def submit(self, *words: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        """Submit the training job as README does."""
        settings = [word for assignment in words for word in ("--set", assignment)]
        return self.ray_job(
            "submit",
            *([] if wait else ["--no-wait"]),
            *("--working-dir", ".", "--runtime-env", "cluster/runtime_env.yaml", "--"),
            *("python", "jobs/train_nvembed.py", "--recipe", "run.yaml", *settings),
        )

    def wait_for(self, job: str, condition: Callable[[str], object], what: str) -> str:
        """The job's log, when it is so."""
        deadline = time.monotonic() + 2 * SECONDS
        while not condition(log := self.ray_job("logs", job).stdout):
            assert time.monotonic() < deadline, f"no {what}:\n{log[-3000:]}"
            time.sleep(1)
        return log


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[pyarrow.fs.FileSystem]:
    """An empty bucket that the environment names, served at the head's address."""
    with s3_server(HEAD) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield pyarrow.fs.S3FileSystem(
            access_key=environment["AWS_ACCESS_KEY_ID"],
            secret_key=environment["AWS_SECRET_ACCESS_KEY"],
            endpoint_override=environment["AWS_ENDPOINT_URL"],
            region=environment["AWS_DEFAULT_REGION"],
        )


@pytest.fixture
def cables() -> Iterator[object]:
    try:
        with plugged() as plugs:
            yield plugs
    except SkippedError as error:
        pytest.skip(str(error))


@pytest.mark.slow("a cluster of three nodes, three submissions of a job with training and scores")
@pytest.mark.timeout(1800)
def test_a_job_from_elsewhere_is_stopped_goes_on_and_registers(
    cables, store: pyarrow.fs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    pyarrow.fs.copy_files(str(inputs), f"{BUCKET}/in", destination_filesystem=store)
    server = MlflowServer(tmp_path / "mlflow", HEAD)
    server.start()
    for name, value in RAY_SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "45")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAYEMBED_CACHE", "")  # is as before afterwards
    nodes = Nodes((0,), PLASMA, cables=cables, apart=True)
    try:
        for _ in range(2):
            nodes.add_node(1, PLASMA)
        laptop = Laptop(tmp_path, nodes.jobs_address)
        run = (inputs / "run.yaml").read_text().replace(str(inputs), f"s3://{BUCKET}/in")
        (laptop.checkout / "run.yaml").write_text(run)
        settings = (
            f"placement.storage_path=s3://{BUCKET}/runs",
            f"placement.tracking_uri={server.uri}",
            "placement.workers=2",
            f"stages.retrieval.steps={STEPS}",
            f"stages.retrieval.checkpoint_every_steps={CHECKPOINT_EVERY}",
            "evaluation.before_training=false",
            "evaluation.baselines=[]",
            "evaluation.validation=null",
        )
        wrong_token_is_refused(laptop, tmp_path)
        stopped_at = submitted_and_stopped(laptop, store, settings)
        began_again = time.time()
        again = laptop.submit(*settings)
        text = again.stdout + again.stderr
        assert again.returncode == 0, text[-5000:]
        # What it did before it was stopped, up to its checkpoint, was not done again.
        metrics = store.open_input_file(f"{BUCKET}/runs/runs/tiny/{METRICS_FILE}").read()
        records = [json.loads(line) for line in metrics.splitlines()]
        kept = [r["global_step"] for r in records if r["time"] < began_again]
        assert kept == list(range(1, stopped_at + 1))
        assert "Registry   tiny version 1" in text
        # Both nodes fetched the backbone into caches of their own.
        fetched = [list(nodes.disk(node).glob("cache/**/config.json")) for node in (1, 2)]
        assert all(fetched)
        version = mlflow.MlflowClient(server.uri).get_model_version("tiny", "1")
        assert version.aliases == ["candidate"]
        assert not (laptop.checkout / "outputs").exists()
    finally:
        nodes.close()
        server.kill()


def wrong_token_is_refused(laptop: Laptop, folder: Path) -> None:
    """Somebody who has another token neither submits nor sees jobs."""
    right = laptop.token
    laptop.token = folder / "another_token"
    laptop.token.write_text(secrets.token_hex(32))
    laptop.token.chmod(0o600)
    for done in (laptop.submit(wait=False), laptop.ray_job("list")):
        assert done.returncode != 0
        assert "Invalid authentication token" in done.stdout + done.stderr, done.stdout
    laptop.token = right
    assert "train_nvembed" not in laptop.ray_job("list").stdout


def steps(log: str) -> list[int]:
    """Steps of the first stage that a job's log tells, and 0."""
    return [0, *map(int, re.findall(rf"step +(\d+)/{STEPS}\b", log))]


def submitted_and_stopped(
    laptop: Laptop, store: pyarrow.fs.FileSystem, settings: tuple[str, ...]
) -> int:
    """Submit, look at the log from elsewhere, and stop when there is a checkpoint; its step."""
    submitted = laptop.submit(*settings, wait=False)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    found = re.search(r"raysubmit_\w+", submitted.stdout)
    assert found is not None, submitted.stdout
    job = found[0]
    laptop.wait_for(job, lambda log: max(steps(log)) > CHECKPOINT_EVERY, "steps in the log")
    stopped = laptop.ray_job("stop", job)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "was stopped" in laptop.ray_job("status", job).stdout
    log = laptop.ray_job("logs", job).stdout
    made = re.search(r"the checkpoint of step (\d+) is made", log)
    assert made is not None, log[-3000:]
    folder = pyarrow.fs.FileSelector(f"{BUCKET}/runs/runs/tiny/retrieval/train", recursive=True)
    names = [info.path for info in store.get_file_info(folder)]
    assert any(f"/{checkpoint_name(int(made[1]))}/" in name for name in names), names
    return int(made[1])

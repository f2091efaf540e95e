"""`train.sbatch` on a real Slurm of two nodes: killed, put back into the queue, a node lost."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import psutil
import pytest
from mlflow_server import MlflowServer
from networks import BRIDGE, DEVICE_OF_GLOO, HEAD, SkippedError, plugged
from slurm import Slurm, slurm
from tiny_job import ROOT, write_inputs

pytestmark = [pytest.mark.job, pytest.mark.ray]

SECONDS = 420
"""For a step of the story; Slurm waits two minutes before it begins a job again."""
FOR_THE_REST = 1200
STEPS, CHECKPOINT_EVERY = 300, 10


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    # Not under /tmp, which each node has for itself.
    if not os.access("/srv", os.W_OK):
        pytest.skip("nodes of Slurm on one machine take root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-drill-", dir="/srv"))
    monkeypatch.setenv(DEVICE_OF_GLOO, BRIDGE)
    try:
        with plugged() as cables, slurm(folder, cables, ("node1", "node2")) as started:
            yield started
    except SkippedError as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commands() -> dict[int, list[str]]:
    """Words of the command of each process of this machine, all nodes among them."""
    found = psutil.process_iter(["cmdline"])
    return {process.pid: process.info["cmdline"] or [""] for process in found}


def networks_of(name: str) -> set[Path]:
    """Networks, one for each node, of the processes whose name begins so."""
    pids = [pid for pid, words in commands().items() if words[0].startswith(name)]
    return {Path(f"/proc/{pid}/ns/net").readlink() for pid in pids}


def driver() -> psutil.Process:
    """The training script's process, on whichever node."""
    script = ["-u", "jobs/train_nvembed.py"]
    (pid,) = [pid for pid, words in commands().items() if words[1:3] == script]
    return psutil.Process(pid)


@pytest.mark.slow("a Slurm cluster of two nodes, a job that is begun three times")
@pytest.mark.timeout(2400)
def test_a_killed_job_and_one_whose_node_is_lost_go_on(cluster: Slurm) -> None:
    shared = cluster.folder / "shared"
    shared.mkdir()
    write_inputs(shared)
    server = MlflowServer(shared / "mlflow", HEAD)
    server.start()
    log, run = shared / "job.log", shared / "storage" / "runs" / "tiny"
    settings = (
        f"stages.retrieval.steps={STEPS}",
        f"stages.retrieval.checkpoint_every_steps={CHECKPOINT_EVERY}",
        "evaluation.before_training=false",
        "evaluation.baselines=[]",
        "evaluation.validation=null",
    )

    def steps() -> list[int]:
        metrics = run / "metrics.jsonl"
        lines = metrics.read_text().splitlines(True) if metrics.exists() else []
        return [json.loads(line)["global_step"] for line in lines if line.endswith("\n")]

    def told() -> str:
        text = log.read_text()[-4000:] if log.exists() else "no log"
        return f"{text}\n{cluster.told('squeue')}\n{cluster.logs()}"

    def wait_for(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}:\n{told()}"
            assert cluster.state(job) != "FAILED", f"{what}:\n{told()}"
            time.sleep(0.5)

    try:
        printed = cluster.told(
            *("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2"),
            *(
                "--mem=6000",
                "--time=60",
                f"--output={log}",
                str(ROOT / "cluster/slurm/train.sbatch"),
            ),
            *("--recipe", str(shared / "run.yaml"), "--name", "tiny"),
            *(word for one in settings for word in ("--set", one)),
            RAYEMBED_HOME=str(ROOT),
            RAYEMBED_STORAGE=str(shared / "storage"),
            RAYEMBED_TRACKING_URI=server.uri,
            RAYEMBED_TOKENS=str(shared / "tokens"),
            RAYEMBED_CACHE=str(shared / "cache"),
            PYTHONPATH=str(ROOT / "platform"),
        )
        job = printed.strip()
        wait_for(lambda: max(steps(), default=0) > CHECKPOINT_EVERY + 2, "it trains")
        assert len(networks_of("ray::RayTrainWorker")) == 2, "each node has a worker"
        driver().kill()
        wait_for(lambda: "put back into the queue" in log.read_text(), "it is put back")
        wait_for(lambda: log.read_text().count("resumes after step") >= 1, "it goes on")
        reached = max(steps())
        wait_for(lambda: max(steps()) > reached + CHECKPOINT_EVERY + 2, "it trains again")
        cluster.kill_node("node2")
        wait_for(lambda: cluster.state(job) == "PENDING", "a lost node is noticed")
        cluster.start_node("node2")
        ongoing = ("PENDING", "RUNNING", "COMPLETING")
        wait_for(lambda: cluster.state(job) not in ongoing, "its end", FOR_THE_REST)
        assert cluster.state(job) == "COMPLETED", told()
        assert steps() == list(range(1, max(steps()) + 1)), "each step counts once"
        assert "Registry   tiny version 1" in log.read_text()
        version = mlflow.MlflowClient(server.uri).get_model_version("tiny", "1")
        assert version.aliases == ["candidate"]
        assert not list((shared / "tokens").glob("slurm-*")), "no token is left"
    finally:
        server.kill()

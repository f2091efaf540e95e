"""Tracking against a real `mlflow server`: away at the start, killed midway, back again."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from mlflow import MlflowClient

from rayembed.errors import TrackingError
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.provenance import collect_provenance, node_hardware
from rayembed.registry.tracking import Tracker

pytestmark = pytest.mark.job

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
AT_ONCE = 60
"""Seconds: far below the four minutes for which MLflow's default retries wait, and far above what
a busy machine makes of a moment."""


class Server:
    """An MLflow server on loopback that keeps its port and its store when it is started again."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            # A group of its own, so that the workers it starts go with it.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                if requests.get(f"{self.uri}/health", timeout=2).ok:
                    return
            except requests.ConnectionError:
                pass
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < end, (self.folder / "server.log").read_text()
            time.sleep(0.1)

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    folder = tmp_path / "server"
    folder.mkdir()
    made = Server(folder)
    yield made
    made.kill()


def open_run(server, folder):
    return Tracker.open(
        server.uri,
        "jobs",
        "tiny",
        "0123456789ab",
        {"model.kind": "biencoder", "model.query_prefix": ""},
        {"placement.workers": "1"},
        folder=folder,
        total_steps=40,
    )


def write(log, first, last):
    for step in range(first, last + 1):
        log.append("only", step, step, {"loss": 1.0 / step, "learning_rate": 1e-4})


def stored(server, run_id, key="train/loss"):
    points = MlflowClient(server.uri, server.uri).get_metric_history(run_id, key)
    return sorted((p.step, p.value) for p in points)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def send_later(folder):
    return subprocess.run(
        [sys.executable, "jobs/send_metrics.py", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_run_against_a_server_that_comes_and_goes(server, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="rayembed")
    folder = tmp_path / "run"
    started = time.monotonic()
    with pytest.raises(TrackingError, match="no MLflow server at"):
        open_run(server, folder)
    assert time.monotonic() - started < AT_ONCE
    assert not folder.exists()

    server.start()
    tracker = open_run(server, folder)
    log = MetricsLog(folder / METRICS_FILE)
    tracker.start_forwarding(log, every_seconds=0.2)
    tracker.log_resolved_run("name: tiny\n")
    tracker.log_provenance(collect_provenance(node_hardware()))
    write(log, 1, 10)
    wait_for(lambda: len(stored(server, tracker.run_id)) == 10, seconds=30)

    # It dies midway: training does not notice, and is told of it once.
    server.kill()
    started = time.monotonic()
    write(log, 11, 20)
    tracker.log_scores("eval", {"WikipediaRetrieval": 0.5}, 20)
    assert time.monotonic() - started < AT_ONCE
    wait_for(lambda: "Training goes on." in caplog.text, seconds=60)
    server.start()
    wait_for(lambda: len(stored(server, tracker.run_id)) == 20, seconds=60)
    wait_for(lambda: "is back" in caplog.text, seconds=60)
    assert caplog.text.count("Training goes on.") == 1
    assert stored(server, tracker.run_id, "eval/WikipediaRetrieval") == [(20, 0.5)]

    # It is away at the end: the rest is sent by the job that the warning names.
    server.kill()
    write(log, 21, 30)
    (folder / "loss.svg").write_text("<svg/>")
    tracker.log_artifact(folder / "loss.svg", "plots")
    assert tracker.close("FINISHED") is False
    assert f"python jobs/send_metrics.py {folder}" in caplog.text
    failed = send_later(folder)
    assert failed.returncode == 2
    assert "no MLflow server at" in failed.stderr
    server.start()
    sent = send_later(folder)
    assert sent.returncode == 0, sent.stderr
    assert "sent 10 steps" in sent.stdout

    everything_arrived_once(server, tracker.run_id)

    # Submitted again, it is the same run.
    again = open_run(server, folder)
    assert again.run_id == tracker.run_id
    assert again.forward(log) == 0
    assert again.close("FINISHED") is True


def everything_arrived_once(server, run_id):
    client = MlflowClient(server.uri, server.uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"model.kind": "biencoder", "model.query_prefix": '""'}
    assert stored(server, run_id) == [(s, 1.0 / s) for s in range(1, 31)]
    assert len(client.search_runs([run.info.experiment_id])) == 1
    files = {f.path for f in client.list_artifacts(run_id)}
    assert files == {"run.yaml", "provenance.json", "plots"}

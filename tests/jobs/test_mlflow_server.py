"""Tracking against a real `mlflow server`: away at the start, killed midway, back again."""

import logging
import os
import sys
import time
from pathlib import Path

import prepared
import pytest
from mlflow import MlflowClient
from mlflow_server import MlflowServer
from result_files import write_results
from tiny_folders import save_biencoder

from rayembed.errors import TrackingError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.pipeline.register.job import run_register_job
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.provenance import collect_provenance, node_hardware
from rayembed.registry.registered_model import ModelReference, connect, download, get_version
from rayembed.registry.tracking import Tracker

pytestmark = pytest.mark.job

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 60
"""Seconds: far below the four minutes for which MLflow's default retries wait, and far above what
a busy machine makes of a moment."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One for all tests, as the last one left it: a start costs ten seconds of a core."""
    made = MlflowServer(tmp_path_factory.mktemp("server"))
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
    """`--send-metrics` of the job that trained the run of the folder's name."""
    storage = f"placement.storage_path={folder.parent.parent}"
    command = ["jobs/train_biencoder.py", "--name", folder.name, "--set", storage]
    return prepared.run(
        [sys.executable, *command, "--send-metrics"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        timeout=120,
    )


def test_run_against_a_server_that_comes_and_goes(server, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="rayembed")
    folder = tmp_path / "runs" / "tiny"
    server.kill()
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
    wait_for(lambda: len(stored(server, tracker.run_id)) == 10, seconds=120)

    # It dies midway: training does not notice, and is told of it once.
    server.kill()
    started = time.monotonic()
    write(log, 11, 20)
    tracker.log_scores("eval", {"WikipediaRetrieval": 0.5}, 20)
    assert time.monotonic() - started < AT_ONCE
    wait_for(lambda: "Training goes on." in caplog.text, seconds=60)
    server.start()
    wait_for(lambda: len(stored(server, tracker.run_id)) == 20, seconds=60)
    wait_for(lambda: "is reachable again and has all data" in caplog.text, seconds=60)
    assert caplog.text.count("Training goes on.") == 1
    assert stored(server, tracker.run_id, "eval/WikipediaRetrieval") == [(20, 0.5)]

    # It is away at the end: the rest is sent by the job that the warning names.
    server.kill()
    write(log, 21, 30)
    (folder / "loss.svg").write_text("<svg/>")
    tracker.log_artifact(folder / "loss.svg", "plots")
    assert tracker.close("FINISHED") is False
    assert "the same command with --send-metrics sends them" in caplog.text
    failed = send_later(folder)
    assert failed.returncode == 1
    assert "no MLflow server at" in failed.stderr
    server.start()
    sent = send_later(folder)
    assert sent.returncode == 0, sent.stderr
    assert "sent 10 steps" in sent.stdout

    everything_arrived_once(server, tracker.run_id)

    # Submitted again, it is the same run.
    again = open_run(server, folder)
    assert again.run_id == tracker.run_id
    assert again.send_all(log, to_the_end=False) == 0
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


def test_registry_job_against_a_server(server, tmp_path, capsys, monkeypatch):
    """Registered, scored, promoted, refused, rolled back and fetched again, all over HTTP."""
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    if server.process is None:
        server.start()
    client = connect(server.uri)
    folders = [save_biencoder(tmp_path / f"model{seed}", seed=seed) for seed in (1, 2, 3)]
    codes = []
    for folder, value in zip(folders, (0.5, 0.6, 0.55), strict=True):
        place = tmp_path / "out" / "results" / "org__m" / weights_fingerprint(folder)
        write_results(place, {"WikiTopicClassification": value})
        arguments = ["--model", str(folder), "--name", "tiny", "--tracking-uri", server.uri]
        arguments += ["--results", str(tmp_path / "out"), "--promote", "--better-than", "champion"]
        codes.append(run_register_job(arguments, about=None))
        capsys.readouterr()
    assert codes == [0, 0, 1]
    assert dict(client.get_registered_model("tiny").aliases) == {"champion": "2", "previous": "1"}
    version = client.get_model_version_by_alias("tiny", "champion")
    model = client.get_logged_model(version.tags["rayembed.model_id"])
    assert {(m.key, m.value) for m in model.metrics} >= {("model/category/Classification", 0.6)}
    assert (
        run_register_job(["--rollback", "--name", "tiny", "--tracking-uri", server.uri], about="")
        == 0
    )
    champion = get_version(client, ModelReference("tiny", None, "champion"))
    assert int(champion.version) == 1
    back = download(client, champion, tracking_uri=server.uri)
    assert weights_fingerprint(back) == weights_fingerprint(folders[0])
    assert [m.name for m in client.search_registered_models()] == ["tiny"]

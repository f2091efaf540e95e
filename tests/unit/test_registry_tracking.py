import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from alembic.util.exc import CommandError
from mlflow import MlflowClient
from small_room import room_for_files
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from rayembed.errors import ArtifactError, ConfigError, PlacementError, TrackingError
from rayembed.pipeline.run.training_job import training_job
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry import mlflow_run, tracking, tracking_uri
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.mlflow_run import (
    NOTE_OF_TRAINING,
    NOTE_TAG,
    batches,
    open_client,
)
from rayembed.registry.run_folder import flatten
from rayembed.registry.tracking import SENT_TAG, Tracker, send_metrics
from rayembed.registry.tracking_uri import (
    check_reachable,
    database_lock,
    resolve_tracking_uri,
    sqlite_path,
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """One SQLite store for all tests of this file; making one takes two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
        yield resolve_tracking_uri(None, str(tmp_path_factory.mktemp("storage")))


@pytest.fixture
def opened(uri, tmp_path, request):
    """Opens this test's run, in a fresh process's place each time."""

    def open_run(name=request.node.name, fingerprint="aaa", params=None, tags=None, **options):
        options = {"folder": tmp_path / "run", "total_steps": 10, **options}
        return Tracker.open(uri, "unit", name, fingerprint, params or {}, tags or {}, **options)

    return open_run


@pytest.fixture
def away(monkeypatch):
    """A switch that takes MLflow away."""
    switch = {"away": True}

    def check(uri):
        if switch["away"]:
            raise TrackingError(f"no MLflow server at {uri}")

    for module in (tracking, mlflow_run):
        monkeypatch.setattr(module, "check_reachable", check)
    return switch


AT_ONCE = 60
"""Seconds: far below the four minutes for which MLflow's default retries wait, and far above what
a busy machine makes of a moment."""


def write(log, first, last):
    for step in range(first, last + 1):
        log.append("only", step, step, {"loss": 1.0 / step, "learning_rate": 1e-4})


def stored(tracker, key="train/loss"):
    """(step, value) of each point in MLflow, in the order of steps."""
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    points = client.get_metric_history(tracker.run_id, key)
    return sorted((p.step, p.value) for p in points)


def run_of(tracker):
    return MlflowClient(tracker.tracking_uri, tracker.tracking_uri).get_run(tracker.run_id)


def test_params_tags_and_first_values(opened, caplog):
    tracker = opened(params={"a.b": 1, "empty": "", "text": "x", "none": None}, tags={"w": "1"})
    run = run_of(tracker)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"a.b": "1", "empty": '""', "text": "x", "none": "null"}
    assert run.data.tags["w"] == "1"
    assert run.data.tags["rayembed.fingerprint"] == "aaa"
    opened(params={"a.b": 2, "text": "x", "new": 3}, tags={"w": "2"})
    run = run_of(tracker)
    assert (run.data.params["a.b"], run.data.params["new"]) == ("1", "3")
    assert run.data.tags["w"] == "2"
    assert "of the run are not recorded: a.b" in caplog.text


def test_same_run_goes_on_and_each_step_is_there_once(opened, tmp_path):
    tracker = opened()
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    write(log, 1, 5)
    assert tracker.send_all(log, to_the_end=False) == 5
    assert tracker.send_all(log, to_the_end=False) == 0
    # Killed; the checkpoint is that of step 3, so 4 and 5 are reported again, at another time.
    again = opened()
    assert again.run_id == tracker.run_id
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    log.truncate(3)
    write(log, 4, 7)
    assert again.send_all(log, to_the_end=False) == 2
    assert stored(again) == [(s, 1.0 / s) for s in range(1, 8)]
    assert again.close("FINISHED")
    assert run_of(again).info.status == "FINISHED"
    third = opened()
    assert run_of(third).info.status == "RUNNING"


def test_a_new_run_says_what_its_names_mean_and_keeps_what_a_user_writes(opened, uri):
    tracker = opened(note=NOTE_OF_TRAINING)
    assert "`model/<task>` scores the registered model" in run_of(tracker).data.tags[NOTE_TAG]
    MlflowClient(uri, uri).set_tag(tracker.run_id, NOTE_TAG, "my own")
    assert run_of(opened(note=NOTE_OF_TRAINING)).data.tags[NOTE_TAG] == "my own"


def test_process_killed_between_metrics_and_tag_sends_no_point_twice(opened, tmp_path):
    tracker = opened()
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    write(log, 1, 4)
    tracker.send_all(log, to_the_end=False)
    MlflowClient(tracker.tracking_uri).set_tag(tracker.run_id, SENT_TAG, "2")
    assert opened().send_all(log, to_the_end=False) == 2
    assert stored(tracker) == [(s, 1.0 / s) for s in range(1, 5)]


def test_what_is_not_finite_is_not_sent_and_the_count_of_it_is(opened, tmp_path):
    tracker = opened()
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    for step, loss in ((1, 2.0), (2, float("nan")), (3, 1.0)):
        log.append("only", step, step, {"loss": loss, "dropped_steps": float(step > 1)})
    assert tracker.send_all(log, to_the_end=False) == 3
    assert stored(tracker) == [(1, 2.0), (3, 1.0)]
    assert stored(tracker, "train/dropped_steps") == [(1, 0.0), (2, 1.0), (3, 1.0)]


def test_cut_log_while_steps_wait_unsent(opened, tmp_path, away):
    """Steps 4 and 5 were read but could not be sent; the resumed run reports them anew."""
    away["away"] = False
    tracker = opened()
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    write(log, 1, 5)
    tracker._every_steps = 100  # all five are read and none is due
    assert tracker.send_all(log, to_the_end=False) == 0
    tracker._every_steps = 1
    log.truncate(3)
    log.append("only", 4, 4, {"loss": 44.0})
    log.append("only", 5, 5, {"loss": 55.0})
    assert tracker.send_all(log, to_the_end=False) == 5
    assert stored(tracker)[3:] == [(4, 44.0), (5, 55.0)]


def test_other_fingerprint_under_the_same_name_is_refused(opened):
    tracker = opened()
    with pytest.raises(ArtifactError, match=r"fingerprint bbb(.|\n)*fingerprint aaa"):
        opened(fingerprint="bbb")
    assert opened().run_id == tracker.run_id


def test_scores_files_and_provenance_arrive(opened, tmp_path):
    tracker = opened()
    plots = tmp_path / "plots"
    plots.mkdir()
    (plots / "loss.svg").write_text("<svg/>")
    tracker.log_resolved_run("name: x\n")
    tracker.log_scores("eval", {"Wiki (en)": 0.5, "STS": 0.25}, 0)
    tracker.log_scores("eval", {"Wiki (en)": 0.75}, 10)
    opened().log_scores("eval", {"Wiki (en)": 0.75}, 10)  # submitted again
    opened().log_scores("eval", {"Wiki (en)": 0.75, "STS": 0.5}, 10)  # with a further task
    tracker.log_artifact(plots, "plots")
    tracker.log_artifact(plots / "loss.svg")
    tracker.log_provenance({"code": {"version": "1", "commit": "c0", "uncommitted_changes": True}})
    assert stored(tracker, "eval/Wiki _en_") == [(0, 0.5), (10, 0.75)]
    assert stored(tracker, "eval/STS") == [(0, 0.25), (10, 0.5)]
    client = MlflowClient(tracker.tracking_uri)
    names = {f.path for f in client.list_artifacts(tracker.run_id)}
    assert names == {"run.yaml", "plots", "loss.svg", "provenance.json"}
    assert [f.path for f in client.list_artifacts(tracker.run_id, "plots")] == ["plots/loss.svg"]
    tags = run_of(tracker).data.tags
    assert tags["mlflow.source.git.commit"] == "c0"
    assert tags["rayembed.uncommitted_changes"] == "True"
    with pytest.raises(ArtifactError, match="does not exist"):
        tracker.log_artifact(tmp_path / "nothing")


def test_files_that_wait_are_sent_from_where_the_run_folder_is_then(opened, tmp_path, away):
    away["away"] = False
    tracker = opened()
    (tmp_path / "run" / "loss.png").write_bytes(b"plot")
    away["away"] = True
    tracker.log_artifact(tmp_path / "run" / "loss.png")
    away["away"] = False
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    again = opened(folder=tmp_path / "elsewhere")
    assert again.run_id == tracker.run_id
    client = MlflowClient(tracker.tracking_uri)
    assert "loss.png" in {f.path for f in client.list_artifacts(tracker.run_id)}


def test_mlflow_away_midway_is_warned_of_once_and_all_is_sent_later(opened, tmp_path, away, caplog):
    caplog.set_level(logging.INFO)
    away["away"] = False
    folder = tmp_path / "run"
    tracker = opened()
    log = MetricsLog(folder / METRICS_FILE)
    before = set(threading.enumerate())
    tracker.start_forwarding(log, every_seconds=0.02)
    write(log, 1, 3)
    wait_for(lambda: len(stored(tracker)) == 3)
    away["away"] = True
    write(log, 4, 6)
    tracker.log_scores("eval", {"STS": 0.5}, 6)
    time.sleep(0.1)
    assert caplog.text.count("Training goes on.") == 1
    away["away"] = False
    wait_for(lambda: len(stored(tracker)) == 6 and "is back" in caplog.text)
    wait_for(lambda: stored(tracker, "eval/STS") == [(6, 0.5)])
    away["away"] = True
    write(log, 7, 8)
    assert tracker.close("FINISHED") is False
    assert "the same command with --send-metrics sends them" in caplog.text
    assert str(folder / METRICS_FILE) in caplog.text
    assert run_of(tracker).info.status == "RUNNING"
    with pytest.raises(TrackingError):
        send_metrics(folder)
    away["away"] = False
    assert send_metrics(folder) == 2
    assert send_metrics(folder) == 0
    assert stored(tracker) == [(s, 1.0 / s) for s in range(1, 9)]
    assert run_of(tracker).info.status == "FINISHED"
    assert "mlflow" not in [thread.name for thread in set(threading.enumerate()) - before]


def test_two_threads_that_miss_mlflow_at_once_say_so_once(opened, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    tracker = opened()
    together = threading.Barrier(8)

    def miss():
        together.wait()
        tracker._warn_away(TrackingError("no MLflow server"))
        together.wait()
        tracker._note_back()

    # Each thread is likely to be interrupted between looking and noting.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=miss) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert caplog.text.count("Training goes on.") == 1
    assert caplog.text.count("is reachable again and has all data") == 1


def test_what_made_a_run_fail_is_told_and_not_that_its_end_cannot_be_kept(opened, tmp_path, caplog):
    tracker = opened()
    outbox = tmp_path / "run" / "mlflow_outbox.jsonl"
    with room_for_files(outbox.stat().st_size):
        assert tracker.close("FAILED") is False
    assert "cannot be written" in caplog.text
    tracker = opened()
    with room_for_files(outbox.stat().st_size), pytest.raises(ArtifactError, match="make room"):
        tracker.close("FINISHED")
    assert opened().close("FINISHED") is True


def test_status_left_by_a_former_process_does_not_end_the_resumed_run(opened, away):
    away["away"] = False
    tracker = opened()
    away["away"] = True
    assert tracker.close("FAILED") is False
    away["away"] = False
    assert run_of(opened()).info.status == "RUNNING"


def test_another_mlflow_gets_everything_from_the_start(opened, tmp_path):
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    tracker = opened()
    write(log, 1, 3)
    tracker.log_scores("eval", {"STS": 0.5}, 3)
    assert tracker.send_all(log, to_the_end=False) == 3
    MlflowClient(tracker.tracking_uri).delete_run(tracker.run_id)
    other = opened()
    assert other.run_id != tracker.run_id
    assert other.send_all(log, to_the_end=False) == 3
    assert stored(other, "eval/STS") == [(3, 0.5)]


def test_long_runs_are_thinned_but_keep_their_end(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_POINTS", 4)
    tracker = opened(total_steps=11)  # every third step
    log = MetricsLog(tmp_path / "run" / METRICS_FILE)
    write(log, 1, 5)
    assert tracker.send_all(log, to_the_end=False) == 1
    write(log, 6, 11)
    tracker._log = log
    assert tracker.close("FINISHED")
    assert [s for s, _ in stored(tracker)] == [3, 6, 9, 11]
    assert len(log.records()) == 11


def test_batches_stay_below_the_limit_and_keep_the_order():
    records = [{"global_step": step, **{f"m{i}": 0.0 for i in range(399)}} for step in range(5)]
    found = list(batches(records))
    assert [[r["global_step"] for r in batch] for batch in found] == [[0, 1], [2, 3], [4]]
    assert list(batches([])) == []


def test_nested_settings_become_one_level():
    values = {"a": {"b": 1, "c": {}}, "s": [{"n": "x"}, {"n": "y"}], "t": [1, 2], "u": None}
    assert flatten(values) == {
        "a.b": 1,
        "a.c": {},
        "s.0.n": "x",
        "s.1.n": "y",
        "t": [1, 2],
        "u": None,
    }


@pytest.mark.enable_socket
def test_server_that_is_away_is_known_at_once(tmp_path):
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9: .*refused(.|\n)*tracking_uri"):
        Tracker.open("http://127.0.0.1:9", "unit", "r", "a", {}, {}, folder=tmp_path, total_steps=1)
    assert time.monotonic() - started < AT_ONCE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.enable_socket
@pytest.mark.parametrize("code", [401, 403])
@pytest.mark.parametrize("open_pages", [(), ("/health",)])
def test_a_server_that_wants_a_user_is_told_with_the_variables(code, open_pages, tmp_path):
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(200 if self.path in open_pages else code)

        do_POST = do_GET
        log_message = Mock()

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(TrackingError) as error:
            Tracker.open(uri, "unit", "r", "a", {}, {}, folder=tmp_path, total_steps=1)
        server.shutdown()
    assert str(code) in str(error.value)
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in str(error.value)


def test_user_setting_of_retries_stands(opened, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "6")
    opened()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "6"


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    assert resolve_tracking_uri("sqlite:///x/m.db", "o") == f"sqlite:///{here}/x/m.db"
    assert (here / "x").is_dir()
    assert resolve_tracking_uri(f"sqlite:///{here}/m.db?a=1", "o") == f"sqlite:///{here}/m.db?a=1"
    assert resolve_tracking_uri(None, "out") == f"sqlite:///{here}/out/mlflow.db"
    assert resolve_tracking_uri("http://h:5000/", "o") == "http://h:5000"
    assert resolve_tracking_uri("postgresql+psycopg2://u@h/d", "o").startswith("postgresql")
    check_reachable("sqlite:///nothing.db")


@pytest.mark.parametrize(
    ("uri", "storage", "message"),
    [
        (None, "s3://bucket/x", "object storage"),
        ("file:///tmp/mlruns", "o", "is not an MLflow address"),
        ("./mlruns", "o", "is not an MLflow address"),
        ("http://", "o", "is not an MLflow address"),
        ("sqlite:///:memory:", "o", "names no database file"),
        ("sqlite:////dev/null/x/m.db", "o", "cannot be created"),
    ],
)
def test_wrong_addresses_are_refused(uri, storage, message):
    with pytest.raises(ConfigError, match=message):
        resolve_tracking_uri(uri, storage)


ODD = ("a%20b", "a b", "a?b", "a#b", "a%", "100%25", "a+b", "ä ö", "a:b", "a&b=c")


@pytest.mark.parametrize("name", ODD)
def test_a_folder_of_any_name_has_its_own_database(name, tmp_path):
    uri = resolve_tracking_uri(None, str(tmp_path / name))
    assert sqlite_path(uri) == tmp_path / name / "mlflow.db"
    assert resolve_tracking_uri(uri, "elsewhere") == uri
    assert Path(make_url(uri).database) == tmp_path / name / "mlflow.db"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "seen"), [("a*b", "pattern"), ("a\nb", "line break")])
def test_a_storage_path_that_cannot_be_named_is_refused_by_a_dry_run(name, seen, tmp_path, capsys):
    argv = ["--set", f"placement.storage_path={tmp_path / name}", "--dry-run"]
    assert training_job("biencoder-quickstart")(argv) == 2
    assert seen in capsys.readouterr().err
    with pytest.raises(PlacementError, match=seen):  # of options, and of a folder above
        absolute_storage(str(tmp_path / name / "outputs"))
    assert absolute_storage("s3://bucket/x?region=*") == "s3://bucket/x?region=*"


_FIRST_JOB = """
import sys
from pathlib import Path
from rayembed.registry.tracking import Tracker
import mlflow
uri, folder, name = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
tracker = Tracker.open(uri, "first", name, "f", {}, {}, folder=Path(folder), total_steps=1)
tracker.log_resolved_run("name: x")
raise SystemExit(0 if tracker.close("FINISHED") else 3)
"""


def test_two_first_jobs_of_a_storage_make_one_database(tmp_path):
    """In a folder whose name is another folder's in quotes, beside that folder."""
    storage, other = tmp_path / "a%20b?c#d", tmp_path / "a b?c#d"
    other.mkdir()
    uri = resolve_tracking_uri(None, str(storage))
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", _FIRST_JOB, uri, str(storage / name), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    ends = [(job.communicate(timeout=120)[1], job.returncode) for job in jobs]
    assert [code for _, code in ends] == [0, 0], ends
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("first")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["one", "two"]
    for run in runs:
        assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["run.yaml"]
    assert len(list((storage / "mlflow_artifacts").rglob("run.yaml"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([storage.name, other.name])
    assert list(other.iterdir()) == []


def half_made(path, *statements):
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)
    return f"sqlite:///{path}"


def test_a_database_that_was_left_half_made_is_recognised(tmp_path):
    left = half_made(
        tmp_path / "left.db",
        "create table runs (run_uuid text, lifecycle_stage text)",
        "insert into runs values ('a', 'active')",
        "create table _alembic_tmp_experiments (id integer)",
    )
    for look in (check_reachable, open_client):
        with pytest.raises(TrackingError, match=r"incomplete: .*_alembic_tmp_experiments.* 1 runs"):
            look(left)


@pytest.mark.parametrize(
    "error",
    [
        OperationalError("alter …", None, Exception("duplicate column name: step")),
        OperationalError("create …", None, Exception("table runs already exists")),
        CommandError("Online migration expected to match one row; 0 found"),
    ],
)
def test_tables_that_cannot_be_made_are_told_of_as_half_made(error, tmp_path, monkeypatch):
    monkeypatch.setattr("mlflow.MlflowClient", Mock(side_effect=error))
    with pytest.raises(TrackingError, match=r"incomplete: .*holds no runs\. Move it away and"):
        open_client(f"sqlite:///{tmp_path / 'x.db'}")


def test_what_is_wrong_with_a_database_otherwise_is_not_called_half_made(tmp_path):
    (tmp_path / "x.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(TrackingError, match="is no SQLite database") as error:
        open_client(f"sqlite:///{tmp_path / 'x.db'}")
    assert "incomplete" not in str(error.value)


def test_a_database_is_waited_for_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking_uri, "LOCK_SECONDS", 0.05)
    path = tmp_path / "x.db"
    with (
        database_lock(path),
        pytest.raises(TrackingError, match="another process"),
        database_lock(path),
    ):
        pass


def test_folder_without_tracking_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="not the folder of a tracked run"):
        send_metrics(tmp_path)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)

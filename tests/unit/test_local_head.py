"""The parts of a local head that need no Ray: token, ports, waiting, stopping, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from waits import note_waits

from rayembed.errors import ConfigError, PlacementError
from rayembed.jobs import quickstart
from rayembed.pipeline.run import local_head, training_job
from rayembed.pipeline.run.on_ray import _submit, read_runtime_env, submit_command
from rayembed.recipes.catalogue import get_recipe

ROOT = Path(__file__).resolve().parents[2]
loopback = pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_token_is_made_once_and_only_for_its_user(home):
    token = local_head.ensure_token()
    file = home / ".ray" / "auth_token"
    assert token is not None
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)  # as Ray itself writes it
    assert local_head.ensure_token() == token
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]


def test_tokens_from_elsewhere(home, monkeypatch):
    other = home / "other"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    with pytest.raises(PlacementError, match="does not exist"):
        local_head.ensure_token()
    other.write_text("")
    with pytest.raises(PlacementError, match="is empty"):
        local_head.ensure_token()
    other.write_text("abc\n")
    assert local_head.ensure_token() == "abc"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "def")
    assert local_head.ensure_token() == "def"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert local_head.ensure_token() is None
    assert not (home / ".ray").exists()


def test_the_environment_of_a_client(home, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("no_proxy", "")
    local_head.prepare_environment()
    local_head.prepare_environment()
    assert os.environ["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert os.environ["no_proxy"] == "127.0.0.1,localhost"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    local_head.prepare_environment()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


@loopback
def test_a_taken_port_is_replaced():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        wanted = local_head.Ports(dashboard=number)
        chosen = local_head.choose_ports(wanted)
    assert chosen.dashboard != number
    assert 20_000 <= chosen.dashboard < 32_000
    assert len({chosen.head, chosen.dashboard, chosen.agent, chosen.client}) == 4
    command = local_head.start_command(chosen, 2)
    assert command[1:5] == ["start", "--head", "--block", "--dashboard-host=127.0.0.1"]
    assert f"--dashboard-port={chosen.dashboard}" in command
    assert "--num-cpus=2" in command


@loopback
def test_a_free_port_is_neither_taken_nor_one_that_connections_get(monkeypatch):
    assert 20_000 <= local_head.free_port() < 32_000
    asked = []
    monkeypatch.setattr(local_head, "_is_free", lambda port: asked.append(port) or len(asked) == 3)
    assert local_head.free_port() == asked[2]
    with pytest.raises(PlacementError, match="no free port"):
        local_head.free_port(range(20_000, 32_000))
    assert len(asked) == 3, "those that are taken are not tried"


class JobsServer(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        allowed = self.headers.get("Authorization") == "Bearer good"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0"}')


@loopback
def test_probe_tells_a_jobs_server_from_nothing_and_from_another_token(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # loopback goes past proxies
    server = HTTPServer(("127.0.0.1", 0), JobsServer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    assert local_head.probe(address, "good") == 200
    assert local_head.probe(address, "bad") == 401
    assert local_head.probe(address, None) == 401
    monkeypatch.setattr(local_head, "_dashboards", lambda: [address])
    assert local_head.find_head("good") == address
    assert local_head.find_head("bad") is None
    server.shutdown()
    server.server_close()
    thread.join()
    assert local_head.probe(address, "good") == 0
    assert local_head.find_head("good") is None


def _fake_start(monkeypatch, script):
    command = ["/bin/bash", "-c", script]
    monkeypatch.setattr(local_head, "start_command", lambda ports, num_cpus: command)


@loopback
def test_a_head_that_dies_or_never_answers_is_an_error_with_its_log(monkeypatch, tmp_path):
    log = tmp_path / "outputs" / "head.log"
    _fake_start(monkeypatch, "echo no port left; exit 7")
    with (
        pytest.raises(PlacementError, match=r"ended at once with exit code 7.*\nno port left"),
        local_head.head(log, None),
    ):
        pass
    _fake_start(monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 100")
    with (
        pytest.raises(PlacementError, match=r"did not answer in 5 s"),
        local_head.head(log, None, timeout_seconds=5),
    ):
        pass
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def _wait_for(file):
    while not file.exists() or not file.read_text().strip():
        time.sleep(0.02)
    return int(file.read_text())


def test_stopping_ends_the_session_and_descendants_and_nothing_else(tmp_path):
    # A member that ignores SIGTERM, one that left the session, one whose parent is gone. The leader
    # is stopped as soon as they are there, so it minds the signal before.
    script = f"""
    trap 'exit 0' TERM
    (trap '' TERM; echo $BASHPID > {tmp_path}/stubborn; while true; do sleep 0.1; done) &
    setsid bash -c 'echo $$ > {tmp_path}/own; exec sleep 100' &
    (sleep 100 & echo $! > {tmp_path}/orphan)
    while true; do sleep 0.1; done
    """
    bystander = subprocess.Popen(["sleep", "100"], start_new_session=True)
    leader = subprocess.Popen(["/bin/bash", "-c", script], start_new_session=True)
    names = ("stubborn", "own", "orphan")
    members = [psutil.Process(_wait_for(tmp_path / name)) for name in names]
    try:
        local_head.stop(leader, leader_seconds=5)
        assert leader.returncode == 0
        assert [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_signal_in_a_deferred_block_is_delivered_after_it():
    seen = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with local_head.deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_the_runtime_environment_of_the_checkout():
    values = read_runtime_env(ROOT / "cluster" / "runtime_env.yaml", ROOT)
    assert values["py_modules"] == [
        str(folder)
        for folder in sorted((ROOT / "platform").iterdir())
        if (folder / "__init__.py").is_file()
    ]
    assert values["working_dir"] == str(ROOT)
    assert "/outputs/" in values["excludes"]


def test_a_runtime_environment_that_cannot_be_used(tmp_path):
    file = tmp_path / "env.yaml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_runtime_env(file, tmp_path)
    file.write_text("- a list")
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_runtime_env(file, tmp_path)
    file.write_text("py_modules: [none]")
    with pytest.raises(ConfigError, match=r"module folder '.*/none', which is missing"):
        read_runtime_env(file, tmp_path)
    file.write_text("py_modules: ['s3://bucket/rayembed.zip']")
    assert read_runtime_env(file, tmp_path)["py_modules"] == ["s3://bucket/rayembed.zip"]


def test_the_command_that_does_the_same_from_any_folder(tmp_path):
    checkout, other, programs = (tmp_path / name for name in ("my ü rayembed", "other", "bin"))
    for folder in (checkout, other, programs):
        folder.mkdir()
    ray = programs / "ray"
    ray.write_text('#!/bin/sh\npwd\necho "$RAY_AUTH_MODE"\nprintf "%s\\n" "$@"\n')
    ray.chmod(0o755)
    entrypoint = ["python", "jobs/x.py", "--set", "data.root=a b"]
    command = submit_command(entrypoint, checkout, address="http://h:1", runtime_env="c/r.yaml")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        cwd=other,
        env={**os.environ, "PATH": path},
    )
    assert done.stdout.splitlines() == [
        *(str(checkout), "token", "job", "submit", "--address", "http://h:1"),
        *("--working-dir", ".", "--runtime-env", "c/r.yaml", "--", *entrypoint),
    ]


@pytest.mark.parametrize(("named", "family"), [([], "nvembed"), (["causal2vec"], "causal2vec")])
def test_the_job_script_is_short_and_passes_arguments_on(named, family):
    done = subprocess.run(
        [sys.executable, "-c",
         "import json, runpy, sys; from rayembed.jobs import quickstart as q\n"
         "q.run_on_local_head = lambda words, **_: print(json.dumps(words)) or 5\n"
         f"sys.argv = {['run_quickstart.py', *named, '--set', 'seed=1']}\n"
         "runpy.run_path('jobs/run_quickstart.py', run_name='__main__')"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert json.loads(done.stdout) == [
        sys.executable, f"jobs/train_{family}.py", "--recipe", f"{family}-quickstart",
        "--set", f"placement.storage_path={ROOT}/outputs", "--set", "seed=1",
    ]  # fmt: skip


def test_a_wrong_setting_is_told_before_a_head_starts(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(
        quickstart, "run_on_local_head", lambda words, **_: started.append(words) or 0
    )
    assert quickstart.quickstart(["cde", "--set", "sead=1"]) == 2
    assert capsys.readouterr().err == "error: no setting 'sead'; did you mean 'seed'?\n"
    assert started == []
    assert quickstart.quickstart(["cde", "--set", "seed=1"]) == 0
    assert len(started) == 1, "the control"
    capsys.readouterr()
    for own in (["--set", "placement.storage_path=/own"], ["--set=placement.storage_path=/own"]):
        assert quickstart.quickstart(["cde", *own]) == 0
        assert started[-1][-len(own) :] == own
        assert sum("placement.storage_path=" in word for word in started[-1]) == 1
    assert capsys.readouterr().err == ""


def test_a_package_without_its_checkout_trains_in_this_process(monkeypatch, tmp_path, capsys):
    submitted, trained = [], []
    monkeypatch.setattr(quickstart, "run_on_local_head", lambda *_, **__: submitted.append(1) or 0)
    monkeypatch.setattr(training_job, "_train", lambda run, _: trained.append(run))
    assert quickstart.quickstart(["cde", "--name", "here"]) == 0
    assert (len(submitted), trained) == (1, []), "the control"
    monkeypatch.setattr(quickstart, "CHECKOUT", tmp_path)
    assert quickstart.quickstart(["cde", "--name", "here"]) == 0
    assert (len(submitted), [run.name for run in trained]) == (1, ["here"])
    assert trained[0].placement == get_recipe("cde-quickstart").placement


def test_a_head_without_an_agent_yet_is_asked_again(monkeypatch):
    note_waits(monkeypatch, "rayembed.pipeline.run.on_ray")

    class Client:
        def __init__(self, answers):
            self.answers = answers

        def submit_job(self, **given):
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    early = RuntimeError("status code 500: No available agent to submit job, please try again")
    assert _submit(Client([early, early, "job-1"]), "true", {}) == "job-1"
    other = RuntimeError("status code 500: disk full")
    with pytest.raises(RuntimeError, match="disk full"):
        _submit(Client([early, other, "job-1"]), "true", {})
    monkeypatch.setattr("rayembed.pipeline.run.on_ray._AGENT_SECONDS", -1.0)
    with pytest.raises(RuntimeError, match="No available agent"):
        _submit(Client([early, "job-1"]), "true", {})

"""A Ray that a job starts for itself: who reaches it, what it runs, and that nothing stays.

First by its name among the tests with Ray: the agent that takes submitted jobs listens on one port,
which the cluster of the later tests holds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.job, pytest.mark.ray]

# In a process of its own, which imports Ray first where it connects.
STARTS = """
import sys, time
from rayembed.pipeline.job import exit_code
from rayembed.pipeline.run.on_ray import connect

def work():
    connect()
    dashboard = sys.modules["ray"]._private.worker.global_worker.node.webui_url
    print("at", f"http://{dashboard}", flush=True)
    try:
        time.sleep(600)
    finally:
        if sys.argv[1:] == ["slowly"]:
            print("stops slowly", flush=True)
            time.sleep(600)

sys.exit(exit_code(work))
"""


def _start(*words):
    """The process, when its Ray has started, and the address of its Jobs server."""
    # Jobs run the first `python` on the path of Ray's processes.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": path},
    )
    word, _, address = process.stdout.readline().strip().partition(" ")
    assert word == "at", process.communicate()[1][-3000:]
    return process, address


@pytest.fixture(scope="module")
def own_ray():
    """The process of a Ray that runs for all tests of this module, and its address."""
    process, address = _start()
    yield process, address
    process.terminate()
    process.communicate(timeout=60)


def _line(text, word):
    return json.loads(next(x for x in text.splitlines() if x.startswith(word)).removeprefix(word))


def _submit(address, checkout):
    """What `ray job submit` says of a job of the checkout, as the guides have it."""
    ray = Path(sys.executable).parent / "ray"
    options = [f"--address={address}", "--working-dir=.", "--runtime-env=cluster/runtime_env.yaml"]
    return subprocess.run(
        [ray, "job", "submit", *options, "--", "python", "jobs/sees.py"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_uploaded_library_and_not_the_installed_one_runs(own_ray, small_checkout):
    _, address = own_ray
    deadline = time.monotonic() + 120
    # A Ray that has just started takes no job until it knows the node that runs it.
    while "No available agent" in (done := _submit(address, small_checkout)).stdout + done.stderr:
        assert time.monotonic() < deadline
    assert done.returncode == 0, done.stdout + done.stderr
    for who in ("DRIVER", "WORKER"):
        file, doc, system, niceness = _line(done.stdout, who)
        assert doc == "The uploaded copy.", file
        assert system  # the standard library's `platform`, not our folder
        assert niceness == os.nice(0)  # Ray's own choice for workers is the lowest priority
    assert _line(done.stdout, "FILES") == [".rayignore", "cluster", "jobs", "platform"]


def test_it_listens_on_loopback_alone(own_ray):
    """Whoever else is on the network reaches none of its processes, with a token or without."""
    process, address = own_ray
    heard, port = {}, address.rpartition(":")[2]
    started = psutil.Process(process.pid)
    for each in [started, *started.children(recursive=True)]:
        with suppress(psutil.Error):
            for one in each.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN:
                    heard[one.laddr.port] = (one.laddr.ip, each.name())
    assert int(port) in heard
    assert any("gcs_server" in name for _, name in heard.values())
    assert any("raylet" in name for _, name in heard.values())
    elsewhere = {
        port: found
        for port, found in heard.items()
        if found[0] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    }
    assert elsewhere == {}


AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Ray's, which look for their cluster's store for a minute where it is gone before they end."""


@pytest.mark.parametrize(
    ("numbers", "code", "later"),
    [([signal.SIGTERM], 143, set()), ([signal.SIGTERM, signal.SIGINT], 130, AGENTS)],
    ids=["in order", "at once"],
)
def test_nothing_of_it_is_left_after_a_signal(alive, numbers, code, later):
    process, _ = _start(*(["slowly"] if len(numbers) > 1 else []))
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(numbers[0])
        for number in numbers[1:]:
            assert process.stdout.readline() == "stops slowly\n"
            process.send_signal(number)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, text
    assert f"{numbers[0].name}: the job is stopped in order" in text
    assert ("stopped; run the same command again to continue" in text) == (len(numbers) == 1)
    assert len(tree) > 5, "the control: there was something to leave behind"
    assert {each.name() for each in alive(tree)} <= later

"""The head of a quickstart: exit codes come through, and nothing that was started stays."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from rayembed.errors import PlacementError
from rayembed.pipeline.run import local_head
from rayembed.pipeline.run.on_ray import run_job, run_on_local_head

pytestmark = [pytest.mark.job, pytest.mark.ray]

# Runs a job in a process of its own, as `make quickstart` does.
RUNNER = """
import sys
from pathlib import Path
from rayembed.pipeline.run import local_head
from rayembed.pipeline.job import exit_code
from rayembed.pipeline.run.on_ray import run_on_local_head
local_head.find_head = lambda token: None  # another Ray on the machine is none of this test's
sys.exit(exit_code(lambda: run_on_local_head(
    sys.argv[2:], checkout=Path(sys.argv[1]), num_cpus=1,
    echo=lambda text: print(text, end="", flush=True))))
"""


@pytest.fixture(scope="module")
def running_head(tmp_path_factory):
    """A head that runs for all tests of this module."""
    log = tmp_path_factory.mktemp("head") / "head.log"
    with local_head.head(log, local_head.ensure_token(), num_cpus=1) as address:
        yield address


def _line(text, word):
    return json.loads(next(x for x in text.splitlines() if x.startswith(word)).removeprefix(word))


def test_the_uploaded_library_and_not_the_installed_one_runs(running_head, small_checkout):
    said = []
    entrypoint = ["python", "jobs/sees.py"]
    code = run_job(entrypoint, address=running_head, checkout=small_checkout, echo=said.append)
    text = "".join(said)
    assert code == 0, text
    for who in ("DRIVER", "WORKER"):
        file, doc, system, niceness = _line(text, who)
        assert doc == "The uploaded copy.", file
        assert system  # the standard library's `platform`, not our folder
        assert niceness == os.nice(0)  # Ray's own choice for workers is the lowest priority
    assert _line(text, "FILES") == [".rayignore", "cluster", "jobs", "platform"]
    assert f"ray job submit --address {running_head} --working-dir ." in text


def test_a_head_listens_on_loopback_alone(running_head):
    """Whoever else is on the network reaches none of its processes, with a token or without."""
    heard, port = {}, running_head.rpartition(":")[2]
    (head,) = (
        child
        for child in psutil.Process().children()
        if f"--dashboard-port={port}" in child.cmdline()
    )
    for process in head.children(recursive=True):
        with suppress(psutil.Error):
            for one in process.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN:
                    heard[one.laddr.port] = (one.laddr.ip, process.name())
    assert int(port) in heard
    assert any("gcs_server" in name for _, name in heard.values())
    assert any("raylet" in name for _, name in heard.values())
    elsewhere = {
        port: found
        for port, found in heard.items()
        if found[0] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    }
    assert elsewhere == {}


def test_a_running_head_is_found_used_and_left(running_head, small_checkout):
    assert local_head.probe(running_head, local_head.ensure_token()) == 200
    assert local_head.probe(running_head, "0" * 64) in (401, 403)
    said = []
    code = run_on_local_head(["python", "jobs/ends.py", "3"], checkout=small_checkout,
                             echo=said.append)  # fmt: skip
    text = "".join(said)
    assert code == 3, text
    assert "already runs on this machine" in text
    assert "ends with 3" in text
    assert local_head.probe(running_head, local_head.ensure_token()) == 200


def test_a_job_that_is_not_taken_is_a_clear_error(small_checkout):
    with pytest.raises(PlacementError, match=r"does not take the job"):
        run_job(["true"], address="http://127.0.0.1:9", checkout=small_checkout, echo=print)


def _start(checkout, *entrypoint):
    command = [sys.executable, "-c", RUNNER, str(checkout), *entrypoint]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_head_is_gone_after_the_job(small_checkout, alive):
    """A second one works: the next test starts others. That 0 comes through stands above.

    The head does not drain its node, which takes 30 seconds where a job has left anything behind.
    """
    runner = _start(small_checkout, "python", "jobs/ends.py", "3")
    seen = set()
    while runner.poll() is None:
        seen |= set(psutil.Process(runner.pid).children(recursive=True))
        time.sleep(0.2)
    text = runner.stdout.read()
    assert runner.returncode == 3, text
    assert "ends with 3" in text
    # The control: there was something to leave behind.
    assert len(seen) > 5
    assert alive(list(seen)) == []
    log = (small_checkout / "outputs" / "local-head.log").read_text()
    assert "are monitored" in log  # Ray's own words, so that of draining would be there too
    assert "raining" not in log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_job_and_the_head(small_checkout, alive, number, code):
    runner = _start(small_checkout, "python", "jobs/waits.py")
    lines = []
    for line in runner.stdout:
        lines.append(line)
        if line.startswith("waits with"):
            break
    assert lines[-1:], "the runner ended early"
    assert lines[-1].startswith("waits with"), "".join(lines)
    grandchild = psutil.Process(int(lines[-1].split()[-1]))
    tree = [*psutil.Process(runner.pid).children(recursive=True), grandchild]
    os.kill(runner.pid, number)
    text, _ = runner.communicate(timeout=120)
    assert runner.returncode == code, text
    assert f"{signal.Signals(number).name}: the job is stopped in order" in text
    assert text.splitlines()[-1].startswith("stopped; the same command goes on")
    assert alive(tree) == []

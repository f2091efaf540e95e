"""What is told while a job runs on a local head: of the head, of the job's silence, of its end."""

import io
import logging
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from waits import Replaced, note_waits

from rayembed.display.progress import SILENCE_SECONDS, doing
from rayembed.pipeline.run import local_head, on_ray

QUICK = 0.02


def _wait_until_told(caplog, text):
    deadline = time.monotonic() + 30
    while not any(text in message for message in caplog.messages):
        assert time.monotonic() < deadline, f"{text!r} is not told: {caplog.messages}"
        time.sleep(QUICK)


def test_what_is_waited_for_before_and_after_a_job_is_told(monkeypatch, tmp_path, caplog):
    """With other words than the job has in between, which tells itself."""
    caplog.set_level(logging.INFO, logger="rayembed")
    monkeypatch.setattr(local_head, "start_command", lambda ports, num_cpus: ["sleep", "100"])
    stop, stopped = local_head.stop, []

    def answers(address, token):
        _wait_until_told(caplog, "still starting the Ray head, ")
        return 200

    def stops_slowly(process):
        caplog.clear()
        _wait_until_told(caplog, "still stopping the Ray head, ")
        stopped.append(set(caplog.messages))
        stop(process)

    monkeypatch.setattr(local_head, "probe", answers)
    monkeypatch.setattr(local_head, "stop", stops_slowly)
    with (
        doing("at the job", silence_seconds=QUICK),
        local_head.head(tmp_path / "head.log", None),
    ):
        caplog.clear()
        _wait_until_told(caplog, "still at the job, ")
        assert all("head" not in message for message in caplog.messages)
    assert len(stopped) == 1
    assert not any("at the job" in message for message in stopped[0])


class FollowedJob:
    """A job that logs two lines at once, one after 50 seconds and one after another 70."""

    def __init__(self, monkeypatch, caplog):
        self.now, self.told, self.caplog = 1000.0, [], caplog
        replaced = Replaced(time, monotonic=lambda: self.now, sleep=lambda seconds: None)
        monkeypatch.setattr(on_ray, "time", replaced)

    async def tail_job_logs(self, job):
        yield "one\ntwo\n"
        for seconds in (50, 70, 10):
            self.now += seconds
            self.caplog.clear()
            if seconds > on_ray._SILENCE:
                _wait_until_told(self.caplog, "silent")
            time.sleep(10 * QUICK)
            self.told.append(set(self.caplog.messages))
            yield f"after {seconds}\n"

    def get_job_info(self, job):
        return SimpleNamespace(status=SimpleNamespace(is_terminal=lambda: True, value="SUCCEEDED"),
                               driver_exit_code=0)  # fmt: skip


def test_only_a_silence_longer_than_a_job_has_is_told_beside_its_log(monkeypatch, caplog):
    """A job that waits says so every ten seconds; two lines of it would come at once otherwise."""
    assert on_ray._SILENCE > 2 * SILENCE_SECONDS
    caplog.set_level(logging.INFO, logger="rayembed")
    job, echoed = FollowedJob(monkeypatch, caplog), []
    with doing("at work", silence_seconds=QUICK):
        assert on_ray._follow(job, "job-1", echoed.append) == 0
    assert "".join(echoed) == "one\ntwo\nafter 50\nafter 70\nafter 10\n"
    before, long, after = job.told
    assert before == after == set()
    assert "waiting for the job, silent for 70 s" in long
    assert all("silent for 70 s" in message for message in long)


def test_what_a_terminal_shows_of_a_silence_makes_room_for_the_log(monkeypatch, caplog):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    caplog.set_level(logging.INFO, logger="rayembed")
    job, seen = FollowedJob(monkeypatch, caplog), []

    def shown():
        return "silent for 70 s" in sys.stderr.getvalue()

    def wait_until_shown(caplog, text):
        deadline = time.monotonic() + 30
        while not shown():
            assert time.monotonic() < deadline
            time.sleep(QUICK)

    def echo(text):
        seen.append((text, sys.stderr.getvalue()[-4:]))

    monkeypatch.setattr(f"{__name__}._wait_until_told", wait_until_shown)
    with doing("at work", silence_seconds=QUICK):
        on_ray._follow(job, "job-1", echo)
    assert shown()
    assert dict(seen)["after 70\n"] == "\x1b[2K"


def test_a_job_that_stops_slowly_is_told(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="rayembed")

    class Job:
        asked = 0

        def get_job_status(self, job):
            self.asked += 1
            if self.asked == 2:
                _wait_until_told(caplog, "still waiting for the job to stop, ")
            return SimpleNamespace(is_terminal=lambda: self.asked > 2)

        def stop_job(self, job):
            caplog.clear()

    note_waits(monkeypatch, "rayembed.pipeline.run.on_ray")
    with doing("at work", silence_seconds=QUICK):
        on_ray._stop_job(Job(), "job-1", lambda text: None)


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from rayembed.pipeline.run import local_head; from rayembed.pipeline.run import on_ray
from rayembed.pipeline.job import exit_code

def waits(*_, **__):
    try:
        print("waits with", *(p.pid for p in local_head.psutil.Process().children()), flush=True)
        time.sleep(100)
    finally:
        if when == "twice":
            print("stops slowly", flush=True)
            time.sleep(100)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests run under
folder, when = Path(sys.argv[1]), sys.argv[2]
local_head.find_head = lambda token: None
local_head.ensure_token = local_head.prepare_environment = lambda: None
local_head.start_command = lambda ports, num_cpus: ["sleep", "100"]
local_head.probe = waits if when == "at its start" else lambda address, token: 200
on_ray.run_job = waits
sys.exit(exit_code(lambda: on_ray.run_on_local_head([], checkout=folder, echo=lambda text: None)))
"""


@pytest.mark.parametrize("when", ["at its start", "in its job", "twice"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_told_and_leaves_no_head(tmp_path, number, when):
    """The second time at once, before what the job does to end in order."""
    command, last = [sys.executable, "-c", SIGNALLED, str(tmp_path), when], number
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        head = psutil.Process(int(run.stdout.readline().split()[-1]))
        assert head.is_running()
        run.send_signal(number)
        if when == "twice":
            assert run.stdout.readline() == "stops slowly\n"
            if number == signal.SIGHUP:  # which closed terminals send twice
                run.send_signal(number)
                with pytest.raises(subprocess.TimeoutExpired):
                    run.wait(0.5)
                last = signal.SIGTERM
            run.send_signal(last)
        _, told = run.communicate(timeout=60)
    assert run.returncode == 128 + last, told
    assert f"{number.name}: the job is stopped in order" in told
    assert ("stopped; the same command goes on" in told) == (when != "twice")
    assert not head.is_running()

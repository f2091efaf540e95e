"""A job whose terminal is closed: its signal comes twice, and what is written goes nowhere."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from rayembed.display.progress import live_line
from rayembed.pipeline.stopping import without_hangups

JOB = """
import contextlib, logging, os, signal, sys, threading, time
from pathlib import Path
from rayembed.pipeline.job import exit_code
from rayembed.display.progress import doing

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("rayembed.job")
log.setLevel(logging.INFO)
notes = Path(sys.argv[1]).open("w", buffering=1)

def work():
    with doing("at work"):
        try:  # the signal may come as soon as the line is read
            with contextlib.suppress(OSError):  # closed before the line has ended
                print("re" "ady", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            # The shell's signal came; the kernel's comes when the shell has ended.
            notes.write("heard\\n")
            while os.getppid() == shell:
                time.sleep(0.01)
            log.info("a checkpoint is made")
            print("made", flush=True)
            notes.write("made\\n")
            raise

shell = os.getppid()
code = exit_code(work)
sys.stdout.flush()
notes.write(f"code {code}\\n")
"""


def test_a_job_whose_terminal_is_closed_ends_in_order(tmp_path):
    job, notes = tmp_path / "job.py", tmp_path / "notes"
    job.write_text(JOB)
    shell, terminal = pty.fork()
    if not shell:
        # A test before this one, or who started them, may have left it ignored or blocked.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    waits = f"trap 'until grep -q heard {notes}; do sleep 0.01; done' EXIT"
    os.write(terminal, f"{waits}\n{sys.executable} {job} {notes}\n".encode())
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    os.waitpid(shell, 0)
    deadline = time.monotonic() + 60
    while "code" not in notes.read_text():
        assert time.monotonic() < deadline, f"after {shown!r} there is {notes.read_text()!r}"
        time.sleep(0.02)
    assert notes.read_text() == "heard\nmade\ncode 129\n"


def test_processes_that_a_checkpoint_needs_are_not_ended_with_the_terminal():
    def ends_of_hangup():
        with subprocess.Popen(["sleep", "100"]) as process:
            process.send_signal(signal.SIGHUP)
            try:
                process.wait(0.3)
            except subprocess.TimeoutExpired:
                process.kill()
                return False
            return True

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests run under
    try:
        with without_hangups():
            assert not ends_of_hangup()
        assert ends_of_hangup(), "the control"
    finally:
        signal.signal(signal.SIGHUP, former)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_line_on_a_terminal_that_is_gone_is_no_error(monkeypatch):
    """Also without a signal, as after `disown`."""
    terminal, job = pty.openpty()
    with open(job, "w", buffering=1, closefd=False) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        line = live_line()
        os.close(terminal)
        with pytest.raises(OSError, match="Input/output"):
            os.write(job, b"the control")
        line.show("at work")
        line.clear()
        os.dup2(os.open(os.devnull, os.O_WRONLY), job)  # for what the stream still holds
    os.close(job)

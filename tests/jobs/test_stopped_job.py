"""A training job that is stopped says so at once, makes a checkpoint and goes on from it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from tiny_job import ROOT, write_inputs

from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog

pytestmark = [pytest.mark.job, pytest.mark.ray]

SETTINGS = (
    "stages.retrieval.steps=5000",  # more than it comes to
    "stages.retrieval.checkpoint_every_steps=5000",
    "evaluation.own_sets=[]",
    "evaluation.validation=null",
    "evaluation.baselines=[]",
    "evaluation.instructions={}",
)


class Submitted:
    """A job in a session of its own, as of a terminal, and when each of its lines came."""

    def __init__(self, folder):
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "jobs/train_nvembed.py", "--recipe", f"{folder}/run.yaml"),
                *("--stage", "retrieval", *words),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def text(self):
        return "".join(line for _, line in self.lines)

    def end(self):
        code = self.process.wait(120)
        self._thread.join(5)
        return code


def wait_for_steps(job, log, more_than):
    deadline = time.monotonic() + 300
    while (last := log.last()) is None or last["step"] <= more_than:
        assert job.process.poll() is None, job.text()[-3000:]
        assert time.monotonic() < deadline, job.text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow(
    "two jobs as processes, each with a checkpoint to make in 30 s, for which the machine must be "
    "idle; what each part does stands in tests/unit/test_stopping.py"
)
def test_both_signals_are_told_at_once_and_the_next_job_goes_on(tmp_path, alive):
    write_inputs(tmp_path)
    log = MetricsLog(tmp_path / "outputs" / "runs" / "tiny" / METRICS_FILE)
    saved = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        job = Submitted(tmp_path)
        try:
            wait_for_steps(job, log, saved + 2)
            tree = psutil.Process(job.process.pid).children(recursive=True)
            sent = time.monotonic()
            # A terminal sends SIGINT to all its processes, of which Ray's leave it. SIGTERM ends
            # those, and comes to the job alone from `kill`, Docker and Kubernetes.
            send = os.killpg if number == signal.SIGINT else os.kill
            send(job.process.pid, number)
            assert job.end() == code, job.text()[-3000:]
        finally:
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
        text = job.text()
        told = next(at for at, line in job.lines if line.startswith(f"{number.name}: the job is"))
        assert told - sent < 1
        assert "\nstopped; run the same command again to continue" in text
        assert "PC: @" not in text
        assert "Traceback" not in text
        assert not saved or f"resumes after step {saved}" in text
        made = re.search(r"the checkpoint of step (\d+) is made", text)
        assert made, text[-3000:]
        step = int(made[1])
        assert step > saved
        saved = step
        assert len(tree) > 5, "the control: there was something to leave behind"
        assert alive(tree) == []

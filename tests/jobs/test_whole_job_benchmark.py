"""The benchmark of whole jobs at toy size: its checks hold, and each job has a row."""

import os
import subprocess
import sys

import pytest
from tiny_job import ROOT

pytestmark = pytest.mark.job


def test_jobs_of_one_model_are_run_killed_resumed_and_checked():
    command = ("--toy", "--runtime", "local", "--models", "nvembed", "--stages", "0")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", str(ROOT / "platform"))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.whole_job", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    checked = [line for line in done.stdout.splitlines() if line.startswith("checked: ")]
    for what in ("it went on after step", "the loss fell", "held-out nDCG@10", "registered"):
        assert any(what in line for line in checked), what
    rows = [line for line in done.stdout.splitlines() if line.startswith("| toy NV-Embed")]
    assert [row.split("|")[2].strip() for row in rows] == ["float32", "auto"]

"""Benchmarks for GPUs at toy size: whole jobs, and both short runs with their limits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_job import ROOT

pytestmark = pytest.mark.job


def test_a_job_of_one_model_is_run_killed_resumed_and_checked():
    command = ("--toy", "--runtime", "local", "--models", "nvembed", "--stages")
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
    assert [row.split("|")[2].strip() for row in rows] == ["auto"]


PARTS = {
    "short_1": [
        *("tests", "weights", "7b", "7b_peer", "bert", "bert_peer", "local_job", "7b_compiled"),
        *("encoding", "encoding_peer", "bert_compiled"),
    ],
    "short_2": ["search", "mining", "passes", "7b_graphs"],
}


@pytest.mark.slow(
    "a job and fourteen processes; each command of both scripts at toy size, but for the job's, is "
    "run by unit/test_estimates_gpu_benchmarks.py, and a job of another model by the test above"
)
@pytest.mark.parametrize("script", PARTS)
def test_a_short_run_ends_well_at_toy_size_within_its_limits_times_four(script, tmp_path):
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), os.environ.get("PYTHONPATH", str(ROOT / "platform"))]
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / f"{script}.sh"), "--toy", str(out)],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": os.pathsep.join(modules),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    tables = (out / "tables.md").read_text()
    ended = [line.split("|")[0] for line in (out / "parts.txt").read_text().splitlines()]
    assert sorted(ended) == sorted(PARTS[script])
    for part in PARTS[script]:
        assert f"\n| {part} | 0 |" in tables
    if script == "short_1":
        assert "skipped" in (out / "tests.log").read_text()
        assert "\n| toy BERT base, all weights | auto | 2 | 150 |" in tables
    else:
        assert "compiled" in tables

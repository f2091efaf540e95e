"""Benchmarks for GPUs at toy size: whole jobs, and all that `all.sh` runs."""

import os
import subprocess
import sys
from pathlib import Path

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


ENCODER, DECODER = "toy encoder, all weights", "toy decoder, LoRA 16"
PARTS = {
    "whole_job": ["toy BERT base, all weights | float32 | 2"],
    "tests": [],
    "training_bert": [
        f"{ENCODER} | rayembed, as it comes",
        f"{ENCODER} | sentence-transformers, SDPA",
    ],
    "training_bert_one_pass": [f"{ENCODER} | rayembed, as it comes"],
    "encoding": [
        *(
            f"{name} | {side}"
            for name in ("toy encoder", "toy encoder again")
            for side in ("rayembed", "rayembed, without threads", "sentence-transformers, SDPA")
        ),
    ],
    "passes": ["toy encoder | 40", "toy encoder again | 40"],
    "training_7b": [
        f"{DECODER} | rayembed, as it comes",
        f"{DECODER} | sentence-transformers, SDPA",
    ],
    "kernels": ["SDPA, padded with a mask, 4/2 × 16", "latent attention"],
    "serving": ["rayembed", "a call for each request"],
    "search": ["rayembed", "rayembed, float32 alone"],
    "mining": ["rayembed", "sentence-transformers"],
}
"""Part of `all.sh` → first cells of rows in its log."""


@pytest.mark.slow(
    "a job on a Ray of its own and ten processes; each script at toy size, and that "
    "all.sh gives each what it takes, stand in unit/test_gpu_benchmarks.py"
)
def test_all_of_them_run_at_toy_size(tmp_path):
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), os.environ.get("PYTHONPATH", str(ROOT / "platform"))]
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "all.sh"), "--toy", str(tmp_path / "out")],
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
    ended = [line.split() for line in done.stdout.splitlines() if line.startswith("== ")]
    assert {words[1]: words[4] for words in ended} == dict.fromkeys(PARTS, "0")
    for part, wanted in PARTS.items():
        log = (tmp_path / "out" / f"{part}.log").read_text()
        if wanted:
            assert "no GPU, torch" in log, part
        for cells in wanted:
            assert f"\n| {cells} |" in log, (part, cells)
    assert "skipped" in (tmp_path / "out" / "tests.log").read_text()

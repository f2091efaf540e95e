"""The benchmarks for GPUs run at toy size on a CPU, without Ray and DeepSpeed, and check first."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.gpu import kernels, measuring, pack, search
from packaging.requirements import Requirement

from rayembed.search import exact

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ("ray", "deepspeed", "mlflow", "mteb", "fastapi", "aiohttp", "vllm")
SCRIPTS = {
    "kernels": ["SDPA, padded with a mask, 4/2 × 16", "latent attention", "256³ | float32"],
    "training": [
        "toy encoder, all weights | rayembed, as it comes",
        "toy encoder, all weights | rayembed, one graph",
        "toy encoder, all weights | rayembed, GradCache",
        "toy encoder, all weights | sentence-transformers, SDPA",
        "toy decoder, LoRA 16 | rayembed, one graph",
        "toy decoder, LoRA 16 | sentence-transformers, SDPA",
        "toy NV-Embed, LoRA 16 | rayembed, GradCache",
    ],
    "encoding": [
        "toy encoder | rayembed",
        "toy encoder | rayembed, without threads",
        "toy decoder | sentence-transformers, SDPA",
    ],
    "passes": ["toy encoder | 40", "toy decoder | 40"],
    "search": ["rayembed", "rayembed, float32 alone", "FAISS, CPU"],
    "mining": ["rayembed", "sentence-transformers"],
    "serving": ["rayembed", "a call for each request"],
    "serve_compressed": [
        "bert, as it was | rayembed",
        "bert, int8 | rayembed",
        "7b, fp8 | rayembed",
    ],
}
"""Script → first cells of rows that it prints."""


@pytest.fixture(scope="module")
def printed():
    """What each script prints, all of them run by one process."""
    modules = [f"benchmarks.gpu.{name}" for name in SCRIPTS]
    support = ROOT / "tests" / "support" / "without_packages.py"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", str(ROOT / "platform"))]
    done = subprocess.run(
        [sys.executable, str(support), ",".join(HIDDEN), *modules, "--", "--toy"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *parts, end = re.split(r"^=== ", done.stdout, flags=re.MULTILINE)[1:]
    assert end.split() == ["end"], "none of the hidden packages came in"
    return {part.partition("\n")[0].rpartition(".")[2]: part for part in parts}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_names_the_machine_checks_and_prints_its_rows(printed, name):
    text = printed[name]
    assert f"torch {torch.__version__}" in text
    assert "checked: " in text
    assert text.index("checked: ") < text.rindex("|---|")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for cells in SCRIPTS[name]:
        (row,) = [row for row in rows if row.startswith(f"| {cells} |")]
        numbers = [cell.strip() for cell in row.split("|")[2 + cells.count("|") : -1]]
        figures = [float(n.rstrip("%").replace(",", "")) for n in numbers if n not in ("", "–")]
        assert max(figures) > 0


def test_every_script_of_the_folder_is_tested_and_told_of():
    told = (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    for path in (ROOT / "benchmarks" / "gpu").glob("*.py"):
        if "def main" in path.read_text():
            assert f"benchmarks.gpu.{path.stem}" in told, path.name
            elsewhere = ("roofline", "compiled_layer", "whole_job", "pack")
            assert path.stem in SCRIPTS or path.stem in elsewhere


def run_all(folder, *arguments, failing=""):
    """What all.sh prints, its exit code, and the commands that it gives to Python."""
    python = folder / "python3"
    python.write_text(
        '#!/bin/bash\necho "$@" >> "$COMMANDS"\n'
        "[[ $FAILING && $* == *$FAILING* ]] && exit 3\nexit 0\n"
    )
    python.chmod(0o755)
    commands = folder / "commands"
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "all.sh"), *arguments],
        env={
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "COMMANDS": str(commands),
            "FAILING": failing,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done, commands.read_text().splitlines() if commands.exists() else []


class Parsed(Exception):
    """Ends a benchmark once its arguments are read."""


def test_all_of_them_are_given_arguments_that_they_take(tmp_path, monkeypatch):
    done, commands = run_all(tmp_path, "--toy", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert len(parts) == len(commands) == 11
    assert all((tmp_path / "out" / f"{part}.log").exists() for part in parts)

    original = argparse.ArgumentParser.parse_args

    def stopped(*given, **named):
        raise Parsed(original(*given, **named))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stopped)
    told = set()
    for command in commands:
        _, module, *given = command.split()
        if module == "pytest":
            paths = [path for path in given if path.endswith(".py")]
            assert paths
            assert all((ROOT / path).exists() for path in paths)
            continue
        with pytest.raises(Parsed) as found:
            importlib.import_module(module).main(given)
        assert found.value.args[0].toy
        told.add(module.rpartition(".")[2])
    assert told == {*SCRIPTS, "whole_job"} - {"serve_compressed"}, "which needs vLLM"


def test_one_that_fails_ends_no_other_and_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    done, commands = run_all(tmp_path, str(tmp_path / "out"), failing="gpu.passes")
    assert done.returncode == 1
    assert "== passes ended with 3" in done.stdout
    assert done.stdout.endswith("NAME.log: passes \n")
    assert len(commands) == 11
    assert not any("--toy" in command for command in commands)
    assert sum("compiled" in command for command in commands) == 3


def test_what_is_packed_is_what_the_requirements_come_to_less_what_is_there():
    class Found:
        def __init__(self, version, *requires):
            self.version, self.requires = version, requires

    installed = {
        "trainer": Found("1", "store>=2; python_version < '3.13'", "old; python_version < '3'"),
        "store": Found("2", "torch", "web; extra == 'server'"),
        "torch": Found("3", "kernels"),
        "kernels": Found("4"),
        "web": Found("5"),
        "old": Found("6"),
    }
    roots = [Requirement("Trainer"), Requirement("absent")]
    found = pack.needed(roots, installed, {"torch"}, "3.12")
    assert found == {"trainer": "1", "store": "2", "kernels": "4"}
    roots = [Requirement("store[server]")]
    assert pack.needed(roots, installed, {"torch", "kernels"}, "3.12") == {"store": "2", "web": "5"}


def test_a_wrong_search_ends_the_benchmark_before_it_is_timed(monkeypatch, capsys):
    def wrong(queries, shards, k, device="cpu"):
        return np.zeros((len(queries), k)), np.tile(np.arange(k), (len(queries), 1))

    monkeypatch.setattr(exact, "top_k", wrong)
    with pytest.raises(SystemExit, match="wrong: rayembed"):
        search.main(["--toy"])
    assert "| side |" not in capsys.readouterr().out


def test_a_wrong_attention_ends_the_benchmark_before_it_is_timed(monkeypatch):
    original = kernels.packed
    monkeypatch.setattr(kernels, "packed", lambda padded, mask: original(padded, mask) * 1.01)
    with pytest.raises(SystemExit, match="wrong: SDPA, padded with a mask"):
        kernels.main(["--toy"])


def test_seconds_are_a_median_without_the_first_calls(monkeypatch):
    ticks = iter([0.0, 100.0, 200.0, 201.0, 300.0, 305.0, 400.0, 402.0])
    clock = lambda: next(ticks)  # noqa: E731 - one line of arithmetic
    calls = []
    monkeypatch.setattr(measuring.time, "perf_counter", clock)
    cpu = torch.device("cpu")
    next(ticks), next(ticks)
    assert measuring.seconds(lambda: calls.append(1), cpu, warmup=2, rounds=3) == 2.0
    assert len(calls) == 5

"""The benchmarks for GPUs run at toy size on a CPU, without Ray and DeepSpeed, and check first."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.gpu import kernels, measuring, pack, search
from packaging.requirements import Requirement

from rayembed.search import exact

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ("ray", "deepspeed", "mlflow", "mteb", "fastapi", "aiohttp", "vllm")
GPU = ROOT / "benchmarks" / "gpu"
ENCODER, DECODER = "toy encoder, all weights", "toy decoder, LoRA 16"
OURS, COMPILED = "rayembed, not compiled", "rayembed, layers compiled"
PEER = "sentence-transformers, padded (SDPA)"
BESIDES = {
    "benchmarks.gpu.kernels --toy": [
        "SDPA, padded with a mask, 4/2 × 16",
        "latent attention",
        "256³ | float32",
    ],
    "benchmarks.gpu.training --toy --models bert nvembed --sides graph cache --steps 1": [
        f"{ENCODER} | rayembed, one graph",
        f"{ENCODER} | rayembed, GradCache",
        "toy NV-Embed, LoRA 16 | rayembed, GradCache",
    ],
    "benchmarks.gpu.serving --toy": ["rayembed", "a call for each request"],
    "benchmarks.gpu.serve_compressed --toy": [
        "bert, as it was | rayembed",
        "bert, int8 | rayembed",
        "7b, fp8 | rayembed",
    ],
}
"""Command that no short run has → first cells of rows that it prints."""
PARTS = {
    "short_1": {
        "7b": [f"{DECODER} | {OURS} | 128"],
        "7b_peer": [f"{DECODER} | {PEER} | all"],
        "bert": [f"{ENCODER} | {OURS} | {n}" for n in ("8,192", "16,384", "65,536")],
        "bert_peer": [f"{ENCODER} | {PEER} | all"],
        "local_job": [],
        "7b_compiled": [f"{DECODER} | {COMPILED} | 128"],
        "encoding": [
            f"{name} | {side}"
            for name in ("toy encoder", "toy encoder again", "toy decoder")
            for side in ("rayembed", "rayembed, without threads")
        ],
        "encoding_peer": [f"{name} | {PEER}" for name in ("toy encoder", "toy encoder again")],
        "bert_compiled": [f"{ENCODER} | {COMPILED} | 65,536"],
    },
    "short_2": {
        "search": ["rayembed", "rayembed, float32 alone", "FAISS, CPU"],
        "mining": ["rayembed", "sentence-transformers"],
        "passes": ["toy encoder again | 40"],
        "7b_graphs": [f"{DECODER} | {COMPILED} | 128"],
    },
}
"""Part that prints a table → first cells of its rows."""


def run_short(folder, script, *arguments, failing=""):
    """The process of a short run, and of each module that it runs the paths and the words.

    These run nothing: a program that notes its arguments and paths stands for Python.
    """
    python = folder / "python3"
    python.write_text(
        '#!/bin/bash\nprintf "%q " "$PYTHONPATH" "$@" >> "$COMMANDS"; echo >> "$COMMANDS"\n'
        "[[ $FAILING && $* == *$FAILING* ]] && exit 3\nexit 0\n"
    )
    python.chmod(0o755)
    (folder / "nvidia-smi").write_text("#!/bin/bash\necho a GPU\n")
    (folder / "nvidia-smi").chmod(0o755)
    commands = folder / f"{script} commands"
    done = subprocess.run(
        ["bash", str(GPU / f"{script}.sh"), *arguments],
        cwd=ROOT,
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
    lines = commands.read_text().splitlines() if commands.exists() else []
    return done, [(paths, words) for paths, _, *words in map(shlex.split, lines)]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Their folder, and of each part of both at toy size the paths and the words of its command."""
    folder = tmp_path_factory.mktemp("short runs")
    found = {}
    for script, parts in PARTS.items():
        done, commands = run_short(folder, script, "--toy", str(folder / script))
        assert done.returncode == 0, done.stdout + done.stderr
        commands = [words for words in commands if words[1][0].startswith("benchmarks.gpu.")]
        if script == "short_1":
            found["weights"] = commands.pop(0)
        found |= dict(zip(parts, commands, strict=True))
    return folder, found


@pytest.fixture(scope="module")
def printed(rehearsed):
    """What each command prints, all of them run by one process."""
    _, found = rehearsed
    found = {part: shlex.join(words) for part, (_, words) in found.items() if part != "local_job"}
    commands = [*found.values(), *BESIDES]
    support = ROOT / "tests" / "support" / "without_packages.py"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", str(ROOT / "platform"))]
    done = subprocess.run(
        [sys.executable, str(support), ",".join(HIDDEN), *commands],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *parts, end = re.split(r"^=== ", done.stdout, flags=re.MULTILINE)[1:]
    assert end.split() == ["end"], "none of the hidden packages came in"
    return dict(zip([*found, *BESIDES], parts, strict=True))


def figures_of(text, cells):
    """Numbers of the row that begins with these cells; None for a dash."""
    (row,) = [row for row in text.splitlines() if row.startswith(f"| {cells} |")]
    numbers = [cell.strip() for cell in row.split("|")[2 + cells.count("|") : -1]]
    return [None if n in ("", "–") else float(n.rstrip("%").replace(",", "")) for n in numbers]


ROWS = {
    **{part: rows for parts in PARTS.values() for part, rows in parts.items() if rows},
    **BESIDES,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_names_the_machine_checks_and_prints_its_rows(printed, name):
    text = printed[name]
    assert f"torch {torch.__version__}" in text
    assert "checked: " in text
    assert text.index("checked: ") < text.rindex("|---|")
    for cells in ROWS[name]:
        assert max(x for x in figures_of(text, cells) if x is not None) > 0


def test_each_row_is_recorded_with_its_prediction(printed, rehearsed):
    folder, _ = rehearsed
    for script, parts in PARTS.items():
        recorded = (folder / script / "tables.md").read_text()
        assert recorded.startswith(f"## {date.today()} · {script}.sh --toy\n")
        for part, rows in parts.items():
            lines = [x for x in printed.get(part, "").splitlines() if x.startswith("| ")]
            lines = [x for x in lines if any(x.startswith(f"| {cells} |") for cells in rows)]
            assert len(lines) == len(rows)
            assert set(lines) <= set(recorded.splitlines()), part
    # pairs/s, then tokens/s, share and GB, each with its prediction
    recorded = (folder / "short_1" / "tables.md").read_text()
    rows = [f"{ENCODER} | {OURS} | 8,192", f"{DECODER} | {OURS} | 128", f"{DECODER} | {PEER} | all"]
    for cells in rows:
        found = figures_of(recorded, cells)
        assert min(found[2], found[4]) > 0, cells


def test_sides_of_a_model_that_is_not_checked_are_compared_with_the_first(printed):
    assert "others are compared with it" in printed["7b"]
    for part in ("7b_peer", "7b_compiled"):
        assert "cosine to the side that ran first at least 1.0" in printed[part]
    assert "cosine to float32 at least 1.0" in printed["bert"]
    assert "others are compared with it" not in printed["bert_peer"]


def test_kernels_of_a_profiled_side_are_listed(printed):
    for part, side in (("7b", OURS), ("7b_compiled", COMPILED)):
        text = printed[part]
        assert f"{DECODER}, {side}: a step under the profiler" in text
        assert "| kernel | calls | ms | share |" in text
        assert "| aten::mm |" in text
    assert "| kernel |" not in printed["bert_peer"]


def test_every_script_of_the_folder_is_tested_and_named():
    readme = (GPU / "README.md").read_text()
    run = {words.split()[0] for words in BESIDES}
    run |= set(re.findall(r"(?:bench|measure) \w+ \d+ (\w+)", (GPU / "short_1.sh").read_text()))
    run |= set(re.findall(r"(?:bench|measure) \w+ \d+ (\w+)", (GPU / "short_2.sh").read_text()))
    run = {name.rpartition(".")[2] for name in run}
    elsewhere = {"roofline", "compiled_layer", "local_run", "pack"}
    for path in GPU.glob("*.py"):
        if "def main" in path.read_text():
            assert f"benchmarks.gpu.{path.stem}" in readme, path.name
            assert path.stem in run | elsewhere


def test_the_peer_alone_finds_what_stands_for_flash_attn_and_tests_exist(rehearsed, tmp_path):
    _, found = rehearsed
    shim = str(GPU / "flash_shim")
    for part, (paths, words) in found.items():
        assert (shim in paths.split(os.pathsep)) == ("peer" in words), part
    _, commands = run_short(tmp_path, "short_1", "--toy", str(tmp_path / "out"))
    (tests,) = [words for _, words in commands if words[0] == "pytest"]
    paths = [word for word in tests if word.endswith(".py")]
    assert len(paths) == 5
    for path in paths:
        assert "mark.gpu" in (ROOT / path).read_text(), path


class Parsed(Exception):
    """Ends a benchmark once its arguments are read."""


def test_the_local_job_is_given_arguments_that_it_takes(rehearsed, monkeypatch):
    _, (module, *given) = rehearsed[1]["local_job"]
    original = argparse.ArgumentParser.parse_args

    def stopped(*given, **named):
        raise Parsed(original(*given, **named))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stopped)
    with pytest.raises(Parsed) as found:
        importlib.import_module(module).main(given)
    options = found.value.args[0]
    assert (options.toy, options.runtime, options.stages) == (True, "local", [])


@pytest.mark.parametrize(("script", "total"), [("short_1", 590), ("short_2", 200)])
def test_limits_of_the_parts_fit_into_the_call(script, total):
    text = (GPU / f"{script}.sh").read_text()
    assert f"\nbegin {total} " in text
    limits = dict(re.findall(r"^(?:.* )?(?:part|bench|measure) (\w+) (\d+) ", text, re.MULTILINE))
    assert set(limits) >= set(PARTS[script])
    weights = int(limits.pop("weights", 0))  # made while the tests run
    assert weights <= int(limits.get("tests", 0))
    assert sum(map(int, limits.values())) <= total - (15 if script == "short_1" else 5)


def test_a_part_that_fails_ends_no_other_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    out = tmp_path / "out"
    done, commands = run_short(tmp_path, "short_2", str(out), failing="gpu.passes")
    assert done.returncode == 1
    assert "== passes ended with 3" in done.stdout
    assert done.stdout.endswith("tests.log): passes \n")
    assert len(commands) == 4
    assert not any("--toy" in words for _, words in commands)
    tables = (out / "tables.md").read_text()
    assert re.search(r"\| passes \| 3 \| \d+ \| 35 \|", tables)
    assert re.search(r"\| search \| 0 \| \d+ \| 50 \|", tables)


def test_a_part_has_no_more_time_than_the_call_has_left(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        f". {shlex.quote(str(GPU / 'parts.sh'))}\nbegin 2 --toy {tmp_path / 'out'}\n"
        "part slow 60 sleep 60\npart late 60 echo never\nfinish\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        ["bash", str(script)],
        cwd=ROOT,
        env={**os.environ, "SLOWER_BY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - began < 20
    assert done.returncode == 1
    assert "== slow ended with 124 after 2 s of 2" in done.stdout
    assert "== late ended with no time left after 0 s" in done.stdout
    assert done.stdout.endswith(": slow late \n")


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


def test_the_peer_leaves_out_padding_over_torchs_kernel_and_keeps_its_vectors(tmp_path):
    """In a process of its own: transformers looks for packages once, and kernels stay."""
    paths = [str(GPU / "flash_shim"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "unpadded_peer.py"), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    name = "sentence-transformers, unpadded (torch's FlashAttention 2)"
    assert done.stdout.count("checked: sentence-transformers leaves out padding") == 2
    assert done.stdout.count(f"checked: {name}: cosine to float32 at least 1.0000") == 2
    for model in (ENCODER, DECODER):
        assert figures_of(done.stdout, f"{model} | {name} | all")[0] > 0
    # An encoder sees both sides, a decoder those before.
    assert "windows [(-1, -1), (-1, 0)]" in done.stdout

"""A command under `benchmarks.avx2` sees a CPU without AVX512, VNNI and AMX."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INFORMATION = Path("/proc/cpuinfo")
FLAGS = INFORMATION.read_text().split() if INFORMATION.exists() else []

FOUND = """
import numpy
found = numpy._core._multiarray_umath.__cpu_features__
print(sorted(name for name in ("AVX2", "AVX512F", "AVX512VNNI") if found[name]))
"""
CHILD = f"""
import faulthandler, os, subprocess, sys
faulthandler.enable()
print(subprocess.check_output([sys.executable, "-c", {FOUND!r}], text=True), end="")
if os.fork() == 0:
    faulthandler.disable()
    os.kill(os.getpid(), 11)
    os._exit(0)
print(os.WTERMSIG(os.waitpid(-1, 0)[1]))
"""


def told(*command):
    return subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=100
    )


@pytest.mark.skipif(
    "cpuid_fault" not in FLAGS
    or "avx512f" not in FLAGS
    or not shutil.which("cc")
    or "hide_units" in os.environ.get("LD_PRELOAD", ""),
    reason="needs a CPU with units to hide, which lets CPUID fault, and a C compiler",
)
def test_units_are_hidden_from_a_command_and_what_it_starts_and_faults_stay_faults():
    plain = told(sys.executable, "-c", FOUND)
    assert "AVX512F" in plain.stdout, "otherwise nothing below is tested"
    hidden = told(sys.executable, "-m", "benchmarks.avx2", sys.executable, "-c", CHILD)
    assert hidden.stdout == "['AVX2']\n11\n", hidden.stderr


def test_without_a_command_it_tells_how_it_is_used():
    found = told(sys.executable, "-m", "benchmarks.avx2")
    assert found.returncode == 1
    assert "python -m benchmarks.avx2 python" in found.stderr

"""A made-up checkout whose jobs say what they see, and what is left of a process tree."""

import shutil
from pathlib import Path

import psutil
import pytest
import yaml

from rayembed.config.table import COMPANIONS

ROOT = Path(__file__).resolve().parents[2]

SEES = """
import json, os, platform, ray, rayembed
ray.init()

@ray.remote(num_cpus=0)
def where():
    import rayembed
    return [rayembed.__file__, rayembed.__doc__, platform.system(), os.nice(0)]

print("DRIVER", json.dumps([rayembed.__file__, rayembed.__doc__, platform.system(), os.nice(0)]))
print("WORKER", json.dumps(ray.get(where.remote())))
print("FILES", json.dumps(sorted(os.listdir("."))))
"""

ENDS = """
import sys
print("ends with", sys.argv[1], flush=True)
sys.exit(int(sys.argv[1]))
"""

WAITS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("waits with", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="session")
def small_checkout(tmp_path_factory):
    """A checkout with the real library (its docstring changed), cluster files and three jobs."""
    checkout = tmp_path_factory.mktemp("checkout")
    for package in ("rayembed", *COMPANIONS):
        if not (ROOT / "platform" / package).is_dir():
            continue
        shutil.copytree(
            ROOT / "platform" / package,
            checkout / "platform" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (checkout / "platform" / "rayembed" / "__init__.py").write_text('"""The uploaded copy."""\n')
    (checkout / "cluster").mkdir()
    shutil.copy(ROOT / "cluster" / "runtime_env.yaml", checkout / "cluster")
    shutil.copy(ROOT / ".rayignore", checkout)
    (checkout / "jobs").mkdir()
    for name, text in {"sees": SEES, "ends": ENDS, "waits": WAITS}.items():
        (checkout / "jobs" / f"{name}.py").write_text(text)
    for ignored in ("outputs", "tests", "docs"):
        (checkout / ignored).mkdir()
        (checkout / ignored / "large.txt").write_text("not uploaded")
    return checkout


@pytest.fixture
def alive():
    """Those of some processes that still run."""

    def still(processes: list[psutil.Process]) -> list[psutil.Process]:
        _, left = psutil.wait_procs(processes, timeout=5)
        return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    return still


@pytest.fixture(scope="session")
def runtime_env_values():
    """The real runtime environment."""
    return yaml.safe_load((ROOT / "cluster" / "runtime_env.yaml").read_text())

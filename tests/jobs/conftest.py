"""A made-up checkout whose job says what it sees, and what is left of a process tree."""

import shutil
from pathlib import Path

import psutil
import pytest

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


@pytest.fixture(scope="session")
def small_checkout(tmp_path_factory):
    """A checkout with the real library (its docstring changed), cluster files and a job."""
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
    (checkout / "jobs" / "sees.py").write_text(SEES)
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

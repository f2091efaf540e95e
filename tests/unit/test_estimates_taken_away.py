"""Without estimates every job works, and a dry run prints what needs no counting."""

import shutil
import subprocess
import sys
from pathlib import Path

import rayembed

PLATFORM = Path(rayembed.__file__).parents[1]

DRY_RUNS = """
import sys
here = sys.argv[1]
sys.path[:] = [here, *(p for p in sys.path if not p.endswith("/platform"))]
import rayembed
assert rayembed.__file__.startswith(here)
from rayembed.jobs.table import JOBS
from rayembed.pipeline.run.dry_run import estimates
from rayembed.recipes.catalogue import get_recipe
recipe = ["--recipe", "biencoder-quickstart", "--dry-run"]
asked = {
    "train": recipe,
    "pretrain": ["--recipe", "nomic-adapt-quickstart", "--dry-run"],
    "sweep": [*recipe, "--set", "seed=choice(1,2)"],
}
jobs = JOBS.members()
for name in jobs.keys() & asked.keys():
    assert jobs[name](asked[name]) == 0, name
print("time of a run:", estimates().time([get_recipe("biencoder-quickstart")]))
"""

COUNTED = ("parameters", "memory a worker", "min from its start")


def dry_runs(platform):
    """What dry runs print, and the time of a run, in a process that finds no other code."""
    command = [sys.executable, "-c", DRY_RUNS, str(platform)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "left out" not in done.stderr
    return done.stdout + done.stderr


def test_dry_runs_print_what_needs_no_counting(tmp_path):
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "estimates")
    shutil.copytree(PLATFORM, tmp_path / "platform", ignore=leave)
    there, away = dry_runs(PLATFORM), dry_runs(tmp_path / "platform")
    for title in ("what it needs", "Stages", "machines"):
        assert title in there
        assert title in away
    assert [word for word in COUNTED if word in there] == list(COUNTED)
    assert [word for word in COUNTED if word in away] == []
    assert "time of a run: None" in away

"""An index whose driver, workers and node are killed equals one that nobody disturbed.

The moments are drawn; `TESTS_SEED` gives another draw than the day.
"""

import datetime
import os
import subprocess
import sys

import pytest
from tiny_job import ROOT

pytestmark = [
    pytest.mark.slow("builds, kills and compares indexes; their boundaries have unit tests"),
    pytest.mark.timeout(2400),
]

SEED = os.environ.get("TESTS_SEED", str(datetime.date.today().toordinal()))


def killed(*words):
    """Run the benchmark with parts of 200 documents."""
    script = ROOT / "benchmarks/index_kills.py"
    return subprocess.run(
        [sys.executable, script, "--seed", SEED, "--rows-per-part", "200", *words],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("store", ["parquet", "lance"])
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_an_index_killed_five_times_has_the_same_rows(runtime, store):
    done = killed("--documents", "20000", "--runtime", runtime, "--store", store)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "| 20,000, 100.00% |" in done.stdout


def test_rows_lost_behind_marks_that_were_written_first_are_seen():
    words = ("--documents", "4000", "--task")
    assert "rows instead of 4,000" in killed(*words, "marks-first").stderr
    right = killed(*words, "slow")
    assert right.returncode == 0, right.stderr[-4000:]

"""The whole drill, with all faults: many minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from networks import SkippedError, plugged
from storage_faults import small_disk

pytestmark = [pytest.mark.job, pytest.mark.ray]


@pytest.mark.slow("half an hour of faults, each of which has a smaller test of its own")
@pytest.mark.timeout(3000)
def test_no_fault_loses_rows_or_changes_weights(tmp_path):
    script = Path(__file__).with_name("run_drill.py")
    done = subprocess.run(
        [sys.executable, script, "--out", tmp_path / "table.md"],
        env={**os.environ, "PYTHONPATH": os.environ["TESTS_SUPPORT"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert len(rows) == 18
    assert "FAILED" not in done.stdout
    not_possible = 0
    for needs_root in (small_disk(tmp_path / "disk"), plugged()):
        try:
            with needs_root:
                pass
        except SkippedError:
            not_possible += 1
    assert done.stdout.count("not thrown") == not_possible

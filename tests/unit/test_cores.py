"""How many cores are worked with."""

import os
import subprocess
import sys

import pytest

from rayembed.cores import num_cores

ON_ONE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from rayembed.cores import num_cores
print(num_cores())
"""


def test_no_more_than_there_are_and_no_more_than_is_said(monkeypatch):
    assert num_cores() >= 1
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert num_cores() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="of Linux")
def test_a_process_that_may_use_one_core_works_with_one():
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"

"""Memory that a step frees stays with the process for the next step."""

import json
import platform
import subprocess
import sys

import pytest

# In a process of its own: what another test has left free in the heap is used again anyhow.
STEPS = """
import json, pathlib, resource
from rayembed.machine.allocator import freed_memory_kept

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (8 << 20) for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

step()
told = {"without": step()}
with freed_memory_kept():
    step()
    told |= {"within": step(), "kept": resident()}
print(json.dumps({**told, "at the end": resident()}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_blocks_of_a_step_are_used_again_within_the_block_and_given_back_after_it():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["without"] > 10 * told["within"]
    assert told["kept"] - told["at the end"] > 15 * (8 << 20)

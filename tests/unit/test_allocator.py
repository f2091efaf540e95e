"""Memory that a step frees stays with the process for the next step."""

import platform
import resource
from pathlib import Path

import pytest
import torch

from rayembed.machine.allocator import freed_memory_kept

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
PAGES_A_STEP = 20 * (8 << 20) // 4096


def faults_of_steps():
    """Page faults of ten steps that allocate twenty blocks of 8 MiB each."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.zeros(2 << 20) for _ in range(20)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@glibc
def test_blocks_of_a_step_are_used_again_within_the_block_alone():
    with freed_memory_kept():
        faults_of_steps()
        within = faults_of_steps()
    assert within < PAGES_A_STEP
    assert faults_of_steps() > 5 * PAGES_A_STEP


@glibc
def test_memory_goes_back_to_the_system_at_the_end():
    with freed_memory_kept():
        faults_of_steps()
        kept = resident()
    assert kept - resident() > 15 * (8 << 20)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

"""How many cores are worked with."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from rayembed.data.vectors.teacher import take_free_threads
from rayembed.errors import ConfigError
from rayembed.machine import hardware
from rayembed.machine.cores import free_threads, num_cores
from rayembed.pipeline.run.runtime import with_threads
from rayembed.recipes.catalogue import get_recipe

ON_ONE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from rayembed.machine.cores import num_cores
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


def machine(monkeypatch, *, cores, own, load, present):
    """A machine with a load of the last minute and cores that are busy now."""
    looks = []

    def percent(seconds):
        looks.append(seconds)
        return 100 * present / cores

    monkeypatch.delenv("RAYEMBED_THREADS")
    monkeypatch.setattr(psutil, "cpu_count", lambda: cores)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_percent", percent)
    monkeypatch.setattr("rayembed.machine.cores.num_cores", lambda: own)
    return looks


@pytest.mark.parametrize(
    ("cores", "own", "load", "present", "number"),
    [
        (2, 2, 0.1, 0.0, 2),
        (2, 2, 9.0, 2.0, 1),  # as many wait for a core as there are
        (2, 2, 1.0, 1.0, 1),  # one other process
        (2, 2, 1.9, 0.1, 2),  # of a run that ended seconds ago
        (2, 2, 0.2, 2.0, 2),  # a moment's work
        (64, 64, 40.0, 40.0, 2),
        (64, 64, 64.0, 63.2, 1),
        (64, 1, 0.0, 0.0, 1),  # a container's limit
        (1, 1, 5.0, 1.0, 1),
    ],
)
def test_threads_that_find_a_core_are_taken(monkeypatch, cores, own, load, present, number):
    looks = machine(monkeypatch, cores=cores, own=own, load=load, present=present)
    chosen = free_threads(2)
    assert chosen.number == number
    assert f"load {load}" in chosen.why or f"load is {load}" in chosen.why
    assert len(looks) <= (0 if load < 0.5 and own > 1 else 1), "an idle machine costs no time"


@pytest.mark.parametrize(("present", "number"), [(0.0, 4), (3.2, 1)])
def test_a_teacher_leaves_cores_that_others_take(monkeypatch, caplog, present, number):
    machine(monkeypatch, cores=4, own=4, load=3.5, present=present)
    monkeypatch.setattr("rayembed.data.vectors.teacher.num_cores", lambda: 4)
    caplog.set_level(logging.INFO, logger="rayembed")
    hardware.say_once.cache_clear()
    take_free_threads("a teacher")
    assert torch.get_num_threads() == number
    told = [line for line in caplog.messages if line.startswith("1 of 4 threads for a teacher: ")]
    assert len(told) == (number < 4)


def test_a_variable_names_the_threads(monkeypatch):
    machine(monkeypatch, cores=2, own=2, load=9.0, present=2.0)
    monkeypatch.setenv("RAYEMBED_THREADS", "3")
    assert free_threads(2) == (3, "RAYEMBED_THREADS says so")
    monkeypatch.setenv("RAYEMBED_THREADS", "many")
    with pytest.raises(
        ConfigError, match="RAYEMBED_THREADS='many' must be a whole number of at least 1"
    ):
        free_threads(2)


@pytest.mark.parametrize(("here", "number"), [(True, 1), (False, 2)])
def test_a_run_says_what_it_took_and_writes_it_down(monkeypatch, caplog, here, number):
    """Of other machines this one's load says nothing; the result is that of the same run."""
    machine(monkeypatch, cores=2, own=2, load=9.0, present=2.0)
    caplog.set_level(logging.INFO, logger="rayembed")
    run = get_recipe("biencoder")
    assert run.placement.threads_per_worker == "auto"
    settled = with_threads(run, SimpleNamespace(is_here=lambda: here))
    assert settled.placement.threads == settled.placement.threads_per_worker == number
    assert f"threads_per_worker: {number}" in settled.to_yaml()
    assert settled.fingerprint == run.fingerprint
    (line,) = caplog.messages
    assert line.startswith(f"{number} thread(s) for each worker: ")
    assert ("other processes take 2.0 of this machine's 2 cores (load 9.0)" in line) is here
    assert with_threads(settled, None) is settled, "a number that is named is taken"


SPINS = "import os, rayembed; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("named", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_waiting_threads_spin_for_a_moment_unless_the_environment_says_how_to_wait(named, spins):
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("GOMP_", "OMP_"))}
    told = subprocess.run(
        [sys.executable, "-c", SPINS], env=clean | named, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [spins]

"""Batches made by processes: those of the thread in their order, errors, and how they end."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from made_up_records import made_up_records
from sent_work import Bound, children, dies, fails, large, leaves, slow_first
from toy_model import ToyTokenizer

from rayembed.data.engine.parts import write_part
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.step_batch import StepBatch
from rayembed.data.plan.stream import PairSteps, prefetched
from rayembed.data.plan.write import write_plan
from rayembed.errors import ConfigError, DataError, WorkerError
from rayembed.machine.ahead import done_by_processes

SETTING = "placement.step_processes"


def made(work, items, processes=2):
    return done_by_processes(work, items, processes=processes, setting=SETTING)


def test_batches_of_a_plan_are_those_of_the_thread_from_any_step(tmp_path: Path) -> None:
    rows = [dataclasses.replace(row, dataset="a") for row in made_up_records(60)]
    parts = {"a": [write_part(str(tmp_path / "parts"), rows)]}
    plan = write_plan(str(tmp_path / "plan"), parts, PlanConfig({"a": 1.0}, 6, 2, 10, 0, True))
    make = PairSteps(plan, ToyTokenizer(), 1, 2)
    ours = list(prefetched(make, 3, 10, 3))
    theirs = list(prefetched(make, 3, 10))
    assert [batch.step for batch in ours] == [*range(3, 10)]
    for one, other in zip(ours, theirs, strict=True):
        for field in dataclasses.fields(StepBatch):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "tokens":
                assert [text.keys() for text in a] == [text.keys() for text in b]
                a, b = ([dict(text) for text in tokens] for tokens in (a, b))
            np.testing.assert_equal(a, b)
            assert type(a) is type(b)
    assert list(prefetched(make, 10, 10, 3)) == []
    assert not children()


def test_results_come_in_order_from_all_processes() -> None:
    found = list(made(slow_first, range(9), 4))
    assert [item for _, item in found] == [*range(9)]
    pids = [pid for pid, _ in found]
    assert len({*pids} - {os.getpid()}) == 4
    assert pids[:4] * 2 + pids[:1] == pids


@pytest.mark.parametrize(
    ("first", "kind", "message"),
    [
        (2, DataError, r"the text '\\u200b' has no tokens"),
        (4, KeyError, "no such column"),
        (6, RuntimeError, "OwnError: this and that"),
    ],
)
def test_an_error_comes_in_its_turn_as_itself(first, kind, message) -> None:
    results = made(fails, range(first, 9))
    assert next(results) == first
    with pytest.raises(kind, match=message) as caught:
        next(results)
    assert "in fails" in caught.value.__notes__[0], "where it was raised"
    assert not children()


def test_a_process_that_dies_is_an_error_that_says_what_to_set() -> None:
    results = made(dies, range(6))
    assert [next(results), next(results)] == [0, 1]
    message = r"a process of placement\.step_processes died at item 2 with exit code -9 .* or to 0"
    with pytest.raises(WorkerError, match=message):
        next(results)
    assert not children()


def test_an_exit_of_the_work_is_named_and_no_other_death_blames_memory() -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3") as caught:
        list(made(leaves, [2]))
    assert "in leaves" in caught.value.__notes__[0]
    with pytest.raises(WorkerError, match="exit code 3 ") as died:
        list(made(leaves, [3]))
    assert "memory" not in str(died.value)
    assert not children()


class Holds:
    """Work with something in it that cannot be pickled."""

    lines = (line for line in ())

    def __call__(self, item: int) -> int:
        return item

    def __getstate__(self):
        return {"lines": self.lines}


@pytest.mark.parametrize("work", [Holds(), Bound()])
def test_a_thread_does_what_cannot_be_sent_unless_processes_are_asked_for(work, caplog) -> None:
    assert list(prefetched(work, 3, 8, 2, False)) == [*range(3, 8)]
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "batches are made by a thread" in warning.message
    with pytest.raises(ConfigError, match=rf"{SETTING}=2 sends {type(work).__name__} to other"):
        list(prefetched(work, 3, 8, 2))
    assert not children()


def test_an_error_of_the_work_is_no_reason_for_a_thread() -> None:
    with pytest.raises(DataError, match="has no tokens"):
        list(prefetched(fails, 3, 8, 2, False))


def test_work_that_cannot_be_sent_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"step_processes=2 sends Holds .*step_processes=0"):
        next(made(Holds(), range(2)))


def test_an_early_end_ends_the_processes_though_nobody_reads_what_they_made() -> None:
    results = made(large, range(100), 3)
    assert len(next(results)) == 8 << 20
    assert len(children()) == 3
    for process in children():
        assert not [m.path for m in process.memory_maps() if "/dev/shm" in m.path]
    began = time.monotonic()
    results.close()
    assert not children()
    assert time.monotonic() - began < 4, "asked to end, not killed after a wait"


SCRIPT = """
import os, signal, sys, time

from rayembed.data.plan.stream import prefetched


class Batch:  # of a script without `if __name__ == "__main__"`
    def __init__(self, step):
        self.step, self.pid = step, os.getpid()


def make(step):
    if step >= 2:
        time.sleep(600)
    return Batch(step)


batches = prefetched(make, 0, 8, 2)
first = [next(batches), next(batches)]
assert [type(batch) for batch in first] == [Batch, Batch]
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
print(*(batch.pid for batch in first), flush=True)
while not stopped:
    time.sleep(0.01)
# As after a checkpoint: whether the processes are still there is for the test to see.
print("stopped", flush=True)
sys.stdin.read()
"""


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_processes_outlive_ctrl_c_and_end_with_their_parent_though_they_hang(
    end: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stderr is not None
    pids = list(map(int, parent.stdout.readline().split()))
    assert len({*pids}) == 2, parent.communicate()[1]
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    assert parent.stdout.readline() == "stopped\n"
    assert all(map(is_alive, pids))
    if end == "killed":
        parent.kill()
    else:
        parent.stdin.close()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "they make batches for nobody"
        time.sleep(0.05)
    parent.wait(20)
    assert "Traceback" not in parent.stderr.read()
    parent.stdout.close(), parent.stderr.close()

"""A worker that does not come to a collective is named by those that wait there."""

import threading
import time

import pytest
import torch
from run_distributed import run_distributed

from rayembed.distributed.collectives import summed
from rayembed.training.faults.hang_reports import Hang
from rayembed.training.faults.hangs import HangWatch

pytestmark = pytest.mark.distributed

WORLD = 2


def late(rank, world):
    """What each worker tells, of which the last comes late to a sum."""
    told, all_told = [], threading.Event()

    def tell(where):
        told.append(where)
        if where.place:
            all_told.set()

    with HangWatch(1.0, tell) as watch:
        watch.on_train_start(None, 0)
        if rank == world - 1:
            reads_forever(all_told)
        total = summed(torch.ones(1))
    return told, float(total)


def reads_forever(ended):
    assert ended.wait(60)
    time.sleep(1)  # until the others, which started at about the same time, have told too


def test_the_stacks_tell_who_waits_and_who_did_not_arrive():
    found = run_distributed(late, WORLD)
    assert [total for _, total in found] == [WORLD, WORLD]
    hang = Hang()
    for told, _ in found:
        hang.take(told[0])
    for told, _ in found:
        hang.take(told[1])
    text = str(hang)
    assert "worker 0 after step 0: waiting for others at distributed/collectives.py" in text
    assert "in summed" in text
    assert "worker 1 after step 0: at work at" in text
    assert text.endswith("so worker 1 did not arrive")

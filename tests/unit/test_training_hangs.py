"""Workers that hang: what each tells, and what is put together of it."""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import rayembed
from rayembed.training import metrics_sink
from rayembed.training.faults.hang_reports import Hang, Where
from rayembed.training.faults.hangs import HangWatch
from rayembed.training.metrics_sink import MetricsSink


def known(rank, workers=4):
    return Where(rank, workers, f"node-{rank}", 100 + rank, 0)


def hangs(rank, place, *, waits, step=7):
    return replace(known(rank), step=step, place=place, waits=waits)


def together(*told, workers=4):
    hang = Hang()
    for rank in range(workers):
        hang.take(known(rank))
    for where in told:
        hang.take(where)
    return hang


SUM = "distributed/collectives.py:85 in summed"
READ = "data/plan/stream.py:40 in prefetched"


def test_who_waits_and_who_did_not_arrive():
    told = str(
        together(
            hangs(0, SUM, waits=True),
            hangs(1, SUM, waits=True),
            hangs(3, READ, waits=False, step=6),
        )
    )
    assert f"workers 0-1 after step 7: waiting for others at {SUM}" in told
    assert f"worker 3 after step 6: at work at {READ}" in told
    assert "worker 2 (process 102 on node-2) says nothing" in told
    assert told.endswith("so workers 2-3 did not arrive")


def test_where_nobody_waits_visibly_no_one_is_blamed():
    """With NCCL the host waits for its device, in no collective's frame."""
    told = str(together(*(hangs(rank, READ, waits=False) for rank in range(4))))
    assert "workers 0-3 after step 7: at work" in told
    assert "did not arrive" not in told


def test_a_hang_that_is_over_and_workers_that_start_anew_are_forgotten():
    hang = together(hangs(0, SUM, waits=True))
    assert str(hang)
    hang.is_over()
    assert not str(hang)
    hang.take(hangs(0, SUM, waits=True))
    hang.take(known(1))  # known already: all are started anew
    assert not str(hang)
    hang.take(hangs(1, SUM, waits=True))
    assert "worker 0" not in str(hang)


def stands_still(seconds):
    time.sleep(seconds)


def test_a_worker_without_a_step_tells_where_its_training_stands(caplog):
    told = []
    with HangWatch(0.4, told.append) as watch:
        watch.on_train_start(None, 3)
        stands_still(1.2)
        assert len(told) == 2  # once for each hang
        watch.on_step_end({"step": 4})
        stands_still(0.8)
    start, first, second = told
    assert (start.step, start.place) == (3, "")
    assert (first.step, second.step) == (3, 4)
    assert first.place.endswith("in stands_still")
    assert not first.waits
    assert "has made no step for 0 s; its training thread is at:" in caplog.text
    assert "time.sleep(seconds)" in caplog.text


@pytest.mark.parametrize(
    ("file", "module", "waits"),
    [
        ("/home/me/rayembed/.venv/lib/torch/distributed/work.py", "torch.distributed.work", True),
        ("/usr/lib/work.py", "deepspeed.comm", True),
        ("/home/me/rayembed/torch/distributed/own.py", "own", False),
        ("/home/me/rayembed/deepspeed/comm/own.py", "torch.distributedly", False),
    ],
)
def test_a_name_in_a_path_makes_no_frame_one_of_the_library(file, module, waits):
    """Nor does it make one of a collective: a checkout may be called by any name."""
    calls, told = "def {}(work):\n    work()", []
    ours, other = {}, {"__name__": module}
    step = Path(rayembed.__file__).parent / "training" / "contrastive" / "step.py"
    exec(compile(calls.format("run_step"), step, "exec"), ours)
    exec(compile(calls.format("library"), file, "exec"), other)
    with HangWatch(0.3, told.append) as watch:
        watch.on_train_start(None, 0)
        ours["run_step"](lambda: other["library"](lambda: time.sleep(0.6)))
    _, hang = told
    assert (hang.place, hang.waits) == ("training/contrastive/step.py:2 in run_step", waits)


@pytest.mark.parametrize("beats", ["on_step_end", "before_checkpoint"])
def test_a_worker_that_works_tells_nothing(beats):
    told = []
    with HangWatch(0.5, told.append) as watch:
        time.sleep(0.7)  # what comes before the training takes as long as it takes
        watch.on_train_start(None, 0)
        for step in range(8):
            time.sleep(0.1)
            watch.on_step_end(
                {"step": step}
            ) if beats == "on_step_end" else watch.before_checkpoint()
    assert len(told) == 1


def test_the_driver_is_warned_once_of_all_and_not_of_a_hang_that_is_over(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(metrics_sink, "_TOGETHER_SECONDS", 0.3)
    sink = MetricsSink(str(tmp_path / "metrics.jsonl"), None)
    for rank in range(2):
        sink.where(known(rank))
    with caplog.at_level(logging.WARNING, "rayembed"):
        sink.where(hangs(0, SUM, waits=True))
        sink.where(hangs(1, READ, waits=False))
        assert "worker 1 did not arrive" in sink.hang()
        _await(lambda: caplog.records)
        assert [record.message for record in caplog.records] == [sink.hang()]
        caplog.clear()
        sink.where(hangs(0, SUM, waits=True))
        sink.append({"stage": "s", "step": 1, "loss": 1.0}, 0)
        time.sleep(0.5)
    assert not caplog.records
    assert not sink.hang()


def _await(condition):
    ended = threading.Event()
    for _ in range(100):
        if condition():
            return
        ended.wait(0.05)
    raise AssertionError("it did not come")

"""A job that is asked to stop: told, ended with the signal's code, the second time hard."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError

from rayembed.errors import ConfigError, DataError
from rayembed.pipeline import stopping
from rayembed.pipeline.job import exit_code
from rayembed.pipeline.stopping import hearing, keep_hearing
from rayembed.training.faults.elastic_on_ray import StoppableTrainer, end_with_checkpoint
from rayembed.training.metrics_sink import MetricsSink

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def handlers():
    """Those of the test run, which may stand under `nohup`, are back afterwards."""
    former = {number: signal.getsignal(number) for number, _ in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield {**former, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_is_told_and_ends_with_its_code(number, code, capfd):
    ended = []

    def work():
        try:
            signal.raise_signal(number)
        finally:
            ended.append(True)

    assert exit_code(work, stopped="stopped; go on so") == code
    first, last = capfd.readouterr().err.strip().splitlines()
    assert first.startswith(f"{number.name}: the job is stopped in order")
    assert last == "stopped; go on so"
    assert ended == [True]


@pytest.mark.parametrize("error", [DataError, RuntimeError])
def test_an_error_that_comes_of_the_stop_is_not_told(error, capfd):
    def work():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise error("a worker is gone") from None

    assert exit_code(work) == 143
    assert "gone" not in capfd.readouterr().err


def test_other_ends_are_as_they_were(capfd, handlers):
    def fails(error):
        raise error

    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 3) == 3
    assert exit_code(lambda: fails(DataError("bad"))) == 1
    assert exit_code(lambda: fails(ConfigError("bad"))) == 2
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: fails(ZeroDivisionError()))
    assert exit_code(lambda: fails(KeyboardInterrupt())) == 130  # a library's own handler
    assert {number: signal.getsignal(number) for number, _ in SIGNALS} == handlers


LINE = "SIGINT: the job is stopped in order"


def test_a_signal_in_asyncio_is_told_once(capfd):
    async def work():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt), hearing():
        asyncio.run(work())
    assert capfd.readouterr().err.count(LINE) == 1


def test_another_thread_hears_nothing(handlers):
    seen = []

    def work():
        with hearing():
            seen.append({number: signal.getsignal(number) for number, _ in SIGNALS})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handlers]


def test_a_signal_that_others_handle_is_left_to_them(capfd):
    taken = []
    with hearing() as heard:
        signal.signal(signal.SIGINT, lambda number, _frame: taken.append(number))
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
    assert taken == [signal.SIGINT]
    assert heard.number is None
    assert capfd.readouterr().err == ""


def test_the_second_signal_ends_the_process(monkeypatch):
    ends = []
    monkeypatch.setattr(stopping.os, "_exit", ends.append)
    with pytest.raises(KeyboardInterrupt), hearing():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # only because the process has not ended here
        signal.raise_signal(signal.SIGTERM)
    assert ends == [143]


def test_a_closed_terminal_stops_nothing_under_nohup(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with hearing() as heard:
        signal.raise_signal(signal.SIGHUP)
        keep_hearing()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == heard.hear
    assert heard.number is None


def test_the_handler_of_a_library_is_replaced_again():
    with hearing() as heard:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)
        assert heard.number is None, "the control"
        keep_hearing()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert heard.exit_code == 143


def test_ray_looks_for_signals_more_often_than_once_a_second(monkeypatch):
    name = "RAY_get_check_signal_interval_milliseconds"  # it is read when Ray is imported
    monkeypatch.delenv(name, raising=False)
    with hearing():
        assert int(os.environ[name]) <= 200


def test_where_nothing_is_heard_handlers_stay(handlers):
    keep_hearing()
    assert {number: signal.getsignal(number) for number, _ in SIGNALS} == handlers


def test_a_checkpoint_is_whole_when_all_workers_have_saved(tmp_path):
    sink = MetricsSink(str(tmp_path / "metrics.jsonl"), None)
    assert sink.stop() is False, "nobody trains yet"
    sink.append({"stage": "s", "step": 1, "loss": 1.0}, 0)
    sink.saved(1, 2)
    assert sink.stop() is True
    assert sink.stops()
    sink.saved(1, 2)
    assert sink.saved_step() == 0, "one of its parts was written before"
    sink.saved(2, 2)
    sink.saved(2, 2)
    assert sink.saved_step() == 2


def test_a_stop_that_finds_ray_gone_says_that_no_checkpoint_is_made(caplog):
    class RemovedRows:
        """An actor whose process was stopped too, and a trainer that is ended all the same."""

        ended = 0

        @property
        def stop(self):
            raise ActorDiedError

        def end(self):
            self.ended += 1

    gone = RemovedRows()
    end_with_checkpoint(gone, gone, "only")
    assert gone.ended == 1
    assert "stage only: no checkpoint can be made" in caplog.text


def test_ray_train_gives_its_controller_where_it_would_take_sigint():
    """Another version of Ray may do so elsewhere."""
    trains = inspect.getsource(StoppableTrainer._initialize_and_run_controller)
    assert "self._register_sigint_handler(controller)" in trains
    before = signal.getsignal(signal.SIGINT)
    trainer = StoppableTrainer.__new__(StoppableTrainer)
    trainer._register_sigint_handler("controller")
    assert trainer._controller == "controller"
    assert signal.getsignal(signal.SIGINT) is before


CALL = """
import os, signal, sys, threading, time
from rayembed.api.calls import shown

def call():
    with shown():
        try:
            os.kill(os.getpid(), signal.{name})
            time.sleep(10)
            print("it goes on")
        finally:
            print("in order")

{how}
print("the program goes on")
"""


@pytest.mark.parametrize(
    ("name", "how", "code", "told"),
    [
        ("SIGTERM", "call()", -signal.SIGTERM, ["in order"]),
        ("SIGHUP", "call()", -signal.SIGHUP, ["in order"]),
        # of a program that handles it, and of one in which it means nothing
        (
            "SIGTERM",
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); call()",
            7,
            ["in order"],
        ),
        (
            "SIGTERM",
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep = print; call()",
            0,
            ["10", "it goes on", "in order", "the program goes on"],
        ),
        # no handler can be set there
        (
            "SIGTERM",
            "thread = threading.Thread(target=call); thread.start(); thread.join()",
            -signal.SIGTERM,
            [],
        ),
    ],
)
def test_a_signal_ends_a_program_in_which_rayembed_is_called(name, how, code, told):
    program = CALL.format(name=name, how=how)
    path = os.pathsep.join([str(Path(stopping.__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number, _ in SIGNALS],
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == told
    is_ours = code < 0 and bool(told)
    assert (f"{name}: the call is stopped in order" in done.stderr) is is_ours
    assert ("stopped; the same call goes on from what is finished" in done.stderr) is is_ours


def test_a_call_leaves_the_handlers_as_they_were(handlers):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for _ in range(2):
        with stopping.ended_in_order(), stopping.ended_in_order():
            assert callable(signal.getsignal(signal.SIGTERM))
            assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL

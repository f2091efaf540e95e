"""What a user sees while a run goes on: in a log, on a terminal, in a notebook."""

import io
import logging
import sys
import threading
import time
import types

import pytest

from rayembed.api.calls import shown
from rayembed.data.engine.work_items import _Done, in_process, run_tasks
from rayembed.display.progress import (
    bar,
    detail,
    doing,
    enter,
    hearing,
    live_line,
    overview,
    pieces,
    tell,
)
from rayembed.display.tables import console
from rayembed.evaluation.jobs import Job as EvaluationJob
from rayembed.evaluation.pooled.progress import ProgressLog
from rayembed.pipeline.job import Job, work_begins

QUICK = 0.02


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="rayembed")


class Stream(io.StringIO):
    """stderr of some kind."""

    encoding = "utf-8"
    is_terminal = False

    def isatty(self):
        return self.is_terminal


def test_a_silence_is_ended_by_what_is_waited_for(caplog):
    with doing("the whole"), doing("waiting for nodes", silence_seconds=QUICK):
        assert caplog.messages == [], "the outermost gives the time"
    with doing("the whole", silence_seconds=QUICK):
        time.sleep(0.2)
        with doing("waiting for nodes"):
            time.sleep(0.2)
    said = list(dict.fromkeys(caplog.messages))
    assert said == ["still the whole, 0 s", "still waiting for nodes, 0 s"]
    assert all(thread.name != "progress" for thread in threading.enumerate())
    assert logging.getLogger("rayembed").handlers == []


def test_who_logs_is_not_interrupted(caplog):
    with doing("busy", silence_seconds=0.4):
        for _ in range(12):
            logging.getLogger("rayembed.data").info("a line")
            time.sleep(0.05)
    assert set(caplog.messages) == {"a line"}


def test_a_text_that_changes_is_told_as_it_is_and_once_at_the_end(caplog):
    done = [0]

    def wait_for(text):
        deadline = time.monotonic() + 30
        while text not in caplog.messages and time.monotonic() < deadline:
            time.sleep(QUICK)

    with doing(lambda: f"{done[0]} of 2", tells_end=True, silence_seconds=QUICK):
        wait_for("still 0 of 2, 0 s")
        done[0] = 1
        wait_for("1 of 2")
        done[0] = 2
    said = list(dict.fromkeys(caplog.messages))
    assert said[:2] == ["still 0 of 2, 0 s", "1 of 2"]
    assert caplog.messages.count("2 of 2") == 1


def test_where_nobody_looks_no_thread_starts(monkeypatch):
    monkeypatch.setattr(logging.getLogger("rayembed"), "propagate", False)
    with doing("unseen"):
        assert all(thread.name != "progress" for thread in threading.enumerate())


def test_the_overview_tells_what_is_done_and_how_long_it_took(caplog):
    with overview(["start", "data", "finetune", "scores"]):
        enter("data")
        enter("finetune", "40/60")
    *told, times = caplog.messages
    assert told == [
        "start → data → finetune → scores",
        "start ✓ → data → finetune → scores",
        "start ✓ → data ✓ → finetune 40/60 → scores",
    ]
    assert times == "start ✓ 0:00:00 → data ✓ 0:00:00 → finetune ✓ 0:00:00 → scores ✓ 0:00:00"
    caplog.clear()
    enter("data")
    detail("1/2")
    assert caplog.messages == [], "without an overview nothing is told"


def test_a_run_that_fails_tells_no_times(caplog):
    with pytest.raises(KeyError), overview(["data", "scores"]):
        raise KeyError
    assert caplog.messages == ["data → scores"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_of_few_characters_gets_plain_ones(encoding, monkeypatch, caplog):
    stream = Stream()
    monkeypatch.setattr(Stream, "encoding", encoding)
    monkeypatch.setattr(sys, "stderr", stream)
    with overview(["data", "scores"]):
        enter("scores")
    assert caplog.messages[1] == "data ok -> scores"
    assert bar(3, 4) == "###############....."


def test_a_terminal_has_one_line_that_changes(monkeypatch, caplog):
    stream = Stream()
    monkeypatch.setattr(Stream, "is_terminal", True)
    monkeypatch.setattr(sys, "stderr", stream)
    with overview(["data", "finetune"]), doing(lambda: bar(3, 4), silence_seconds=QUICK):
        time.sleep(0.1)
        detail("1/4")
        time.sleep(0.1)
        shown = stream.getvalue()
        logging.getLogger("rayembed").info("a line")
        assert stream.getvalue()[len(shown) :].startswith("\x1b[2K"), "it makes room"
    lines = shown.split("\r")
    assert lines[0] == "\x1b[2Kdata → finetune  |  ███████████████░░░░░  0:00:00"
    assert lines[-2].startswith("\x1b[2Kdata 1/4 → finetune  |  ")
    assert stream.getvalue().endswith("\x1b[2K\r")
    assert not any("█" in line for line in caplog.messages), "the log has no lines of it"


@pytest.fixture
def notebook(monkeypatch):
    """IPython in a notebook, with all that its outputs showed, each a list."""
    outputs = []

    class Handle:
        def __init__(self, shown):
            self.shown = shown

        def update(self, data, *, raw):
            assert raw
            self.shown.append(data)

    def display(data, *, raw, display_id):
        assert raw
        assert display_id
        outputs.append([data])
        return Handle(outputs[-1])

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.SimpleNamespace(display=display)
    ipython.outputs = outputs
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return ipython


def test_the_log_of_a_call_in_a_notebook_is_one_output(notebook, monkeypatch, capsys):
    ours = logging.getLogger("rayembed")
    monkeypatch.setattr(ours, "propagate", False)
    with shown():
        ours.info("reads <rows>")
        for text in ("the first task", "the second task"):
            with doing(text, silence_seconds=QUICK):
                time.sleep(0.1)
        console().print("a line")
        ours.warning("slow disk")
    (output,) = notebook.outputs
    texts = [data["text/plain"] for data in output]
    assert any("reads <rows>\nthe second task" in text for text in texts), "below the log"
    assert output[-1]["text/html"].startswith("<details><summary>2 lines of log in 0:00:00</")
    assert "reads &lt;rows&gt;\n0:00:00  slow disk</pre>" in output[-1]["text/html"]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a line\n", "slow disk\n")
    assert ours.handlers == []


def test_a_call_in_a_notebook_that_logs_nothing_leaves_an_empty_output(notebook, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rayembed"), "propagate", False)
    with shown(), doing("a task", silence_seconds=QUICK):
        time.sleep(0.1)
    assert [output[-1]["text/plain"] for output in notebook.outputs] == [""]


def test_a_notebook_has_an_output_that_changes(notebook, monkeypatch):
    with doing(lambda: f"<{bar(3, 4)}>", silence_seconds=QUICK):
        time.sleep(0.2)
    (output,) = notebook.outputs
    assert output[1]["text/html"] == "<pre>&lt;███████████████░░░░░&gt;  0:00:00</pre>"
    assert output[1]["text/plain"] == "<███████████████░░░░░>  0:00:00"
    notebook.get_ipython = types.SimpleNamespace  # IPython in a terminal has no kernel
    monkeypatch.setattr(sys, "stderr", Stream())
    assert live_line() is None


def test_the_start_of_workers_counts_for_no_rate(caplog):
    def execute(task, items, needs):
        time.sleep(1.5)
        yield from in_process(task, items, needs)

    class Item:
        key = "a"

    def work(item):
        time.sleep(0.1)
        return {"rows_in": 100}

    assert run_tasks("mine", work, [Item(), Item()], execute) == [{"rows_in": 100}] * 2
    (line,) = caplog.messages
    head, rows, rate, end = line.split(", ")
    assert (head, rows, end) == (f"mine: {bar(2, 2)} 2/2", "200 rows", "0:00:00")
    assert 500 < float(rate.removesuffix(" rows/s").replace(",", "")) <= 1000


def test_an_item_that_takes_long_is_told_by_its_share(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shown = _Done("mine", 4)
    lines = []

    def work(item):
        for _ in pieces(range(2)):
            for tenth in range(10):
                clock[0] += 1
                tell(tenth / 10)
                lines.append(shown.text())
        return {}

    with hearing(shown.note):
        shown.add(work("a"), 20.0)
        shown.add(work("b"), 20.0)
    assert lines[0] == f"mine: {bar(0, 4)} 0/4"
    assert lines[10] == f"mine: {bar(0.125, 1)} 0/4 (12 %), 0:01:10 left"
    assert lines[30] == f"mine: {bar(0.375, 1)} 1/4 (38 %), 0:00:52 left"
    assert shown.text() == f"mine: {bar(2, 4)} 2/4, 0:00:40 left"
    tell(0.5)  # nobody hears it any more
    assert shown.text() == f"mine: {bar(2, 4)} 2/4, 0:00:40 left"


class FakeJob(EvaluationJob):
    name, num_texts = "SciFact", 1000

    def run(self, model):
        raise AssertionError


def test_the_first_texts_count_for_no_rate(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = ProgressLog([FakeJob()])
    assert log.text() == "0/1 tasks, no text embedded yet: workers and their model start"
    clock[0] = 500.0
    log.update({"SciFact": (100, 1000)})
    assert log.text() == "0/1 tasks, 100 texts, SciFact 10 %"
    clock[0] = 540.0
    log.update({"SciFact": (200, 1000)})
    assert log.text() == "0/1 tasks, 200 texts, 2 texts/s, about 0:05:20 left, SciFact 20 %"


def test_an_empty_text_is_not_told(caplog):
    with doing("", silence_seconds=QUICK):
        time.sleep(0.2)
    assert caplog.messages == []


def test_an_empty_text_leaves_the_terminal_to_others(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(Stream, "is_terminal", True)
    monkeypatch.setattr(sys, "stderr", stream)
    with doing("submitting", silence_seconds=QUICK):
        time.sleep(0.2)
        assert "submitting" in stream.getvalue()
        with doing(""):
            time.sleep(0.2)
            assert stream.getvalue().endswith("\x1b[2K"), "what stood there is gone"


def test_a_job_tells_its_phase_when_its_start_is_over(monkeypatch, caplog):
    quick = {**doing.__wrapped__.__kwdefaults__, "silence_seconds": QUICK}
    monkeypatch.setattr(doing.__wrapped__, "__kwdefaults__", quick)

    def told() -> str:
        caplog.clear()
        deadline = time.monotonic() + 30
        while not (still := [text for text in caplog.messages if text.startswith("still")]):
            assert time.monotonic() < deadline, "nothing is told"
            time.sleep(QUICK)
        return still[0].rpartition(",")[0]

    seen = []

    def run(_subject, _context):
        seen.append(told())
        work_begins()
        seen.append(told())
        with overview(["data", "scores"]):
            seen.append(told())

    assert Job(read=lambda args: None, run=run)([]) == 0
    assert seen == ["still at the start: imports and checks", "still at work", "still data"]

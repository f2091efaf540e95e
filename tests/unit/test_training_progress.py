"""The lines that a job's log shows while a stage is trained."""

import logging
import time

from rayembed.config.override import override
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.progress import Progress

RATES = {"learning_rate": 1e-5, "pairs_per_second": 8.0}
STEP = {"loss": 1.5, "tokens": 600, "seconds": 10.0, **RATES}


def changes_told(log, caplog, *steps_and_workers):
    """Lines on the number of workers in a submission that trains these steps."""
    caplog.set_level(logging.INFO, logger="rayembed")
    caplog.clear()
    with Progress(get_recipe("biencoder").stages[0], log.path):
        for step, workers in steps_and_workers:
            number = {} if workers is None else {"workers": workers}
            log.append("finetune", step, step, {**STEP, **number})
    return [line for line in caplog.messages if "workers from" in line]


def test_changes_of_the_number_of_workers_are_told_once(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    done_again = (1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (5, 1)
    assert changes_told(log, caplog, *done_again) == [
        "stage finetune: 2 instead of 1 workers from step 3 on",
        "stage finetune: 1 instead of 2 workers from step 5 on",
    ]
    assert changes_told(log, caplog, (6, 1), (7, 4)) == [
        "stage finetune: 4 instead of 1 workers from step 7 on"
    ]


def test_the_log_of_an_earlier_version_knows_no_workers(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert changes_told(log, caplog, (1, None), (2, None)) == []
    assert changes_told(log, caplog, (3, 2)) == []


def shown(log, caplog, *steps, name="biencoder", setting="stages.finetune.steps=1000"):
    """Lines of a submission that trains steps given as numbers or (number, metrics)."""
    caplog.set_level(logging.INFO, logger="rayembed")
    caplog.clear()
    with Progress(override(get_recipe(name), [setting]).stages[0], log.path):
        for number, metrics in steps:
            log.append("finetune", number, number, {**STEP, **metrics})
    return [line for line in caplog.messages if "  step " in line]


def test_dropped_steps_are_told_and_do_not_spoil_the_mean(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    (line,) = shown(log, caplog, (1, {"loss": 2.0, "dropped_steps": 0.0}))
    assert "dropped" not in line
    lost = {"loss": float("nan"), "dropped_steps": 1.0}
    (line,) = shown(log, caplog, (2, {"loss": 2.0}), (3, lost), (4, {**lost, "loss": 4.0}))
    assert line.endswith("1 dropped")
    assert "loss 3.000" in line


def test_the_first_step_counts_neither_for_rates_nor_for_the_time_left(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    (line,) = shown(log, caplog, (1, {"seconds": 500.0}))
    assert not line.endswith("left")
    steps = (2, {"seconds": 500.0}), (3, {}), (4, {})
    (line,) = shown(log, caplog, *steps, setting="stages.finetune.steps=20004")
    assert "step 4/20004" in line
    assert "60 tokens/s" in line
    assert line.endswith("2 days, 7:33:20 left"), "20,000 steps of 10 s"


def test_no_step_of_an_earlier_submission_is_shown_again(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    shown(log, caplog, (34, {}), (35, {}))
    assert shown(log, caplog) == []
    (line,) = shown(log, caplog, (21, {}))
    assert "step 21/1000" in line


def test_something_is_told_while_there_is_no_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="rayembed")
    with Progress(get_recipe("biencoder").stages[0], tmp_path / "log.jsonl", every_seconds=0.01):
        time.sleep(0.3)
    assert caplog.messages.count("still stage finetune: no step yet, 0 s") > 1

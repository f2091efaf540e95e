"""The lines that a job's log shows while a stage is trained."""

import logging

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


def test_dropped_steps_are_told_and_do_not_spoil_the_mean(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    caplog.set_level(logging.INFO, logger="rayembed")
    for number, (loss, dropped) in enumerate([(2.0, 0.0), (float("nan"), 1.0), (4.0, 1.0)], 1):
        log.append("finetune", number, number, {**STEP, "loss": loss, "dropped_steps": dropped})
        with Progress(get_recipe("biencoder").stages[0], log.path):
            pass
    lines = [line for line in caplog.messages if "step " in line]
    assert [line.endswith("1 dropped") for line in lines] == [False, True, True]
    assert "loss 3.000" in lines[-1]


def test_the_time_left_has_its_days(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for number in (1, 2):
        log.append("finetune", number, number, STEP)
    run = override(get_recipe("biencoder"), ["stages.finetune.steps=20002"])
    caplog.set_level(logging.INFO, logger="rayembed")
    with Progress(run.stages[0], log.path):
        pass
    line = caplog.messages[-1]  # 20,000 steps of 10 s
    assert "step 2/20002" in line
    assert "60 tokens/s" in line
    assert line.endswith("2 days, 7:33:20 left")

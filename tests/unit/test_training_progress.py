"""The lines that a job's log shows while a stage is trained."""

import logging

from rayembed.config.override import override
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.progress import Progress


def test_the_time_left_has_its_days(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    step = {"loss": 1.5, "learning_rate": 1e-5, "pairs_per_second": 8.0, "tokens": 600}
    for number in (1, 2):
        log.append("finetune", number, number, {**step, "seconds": 10.0})
    run = override(get_recipe("biencoder"), ["stages.finetune.steps=20002"])
    caplog.set_level(logging.INFO, logger="rayembed")
    with Progress(run.stages[0], log.path):
        pass
    line = caplog.messages[-1]  # 20,000 steps of 10 s
    assert "step 2/20002" in line
    assert "60 tokens/s" in line
    assert line.endswith("2 days, 7:33:20 left")

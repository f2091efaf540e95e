"""Copies of a run's curves in TensorBoard and Weights & Biases; the run does not depend on them."""

import json
import logging

import pytest

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry import mirrors as module
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.registry.mirrors import Mirrors, check_mirrors

STEPS = {1: 2.0, 2: float("nan"), 3: 1.0}


def run_with(*names):
    return override(get_recipe("biencoder"), [f"placement.mirrors={json.dumps(names)}"])


@pytest.fixture
def log(tmp_path):
    log = MetricsLog(tmp_path / METRICS_FILE)
    for step, loss in STEPS.items():
        log.append("finetune", step, step, {"loss": loss})
    return log


def test_tensorboard_has_every_step_once_also_when_a_run_is_submitted_again(log, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        mirrors = Mirrors(run_with("tensorboard"), tmp_path, log.path)
        mirrors.log_scores("eval", {"task": 0.5}, 3)
        mirrors.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert losses == [(1, 2.0), (3, 1.0)], "a loss that is no number has no point"
    assert [(p.step, p.value) for p in found.Scalars("eval/task")] == [(3, 0.5)]


@pytest.mark.job  # its own process beside this one is reached by a Unix socket
def test_weights_and_biases_gets_the_same(log, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    mirrors = Mirrors(run_with("wandb"), tmp_path, log.path)
    (writer,) = mirrors._writers
    sent = []
    logged = writer._run.log
    monkeypatch.setattr(writer._run, "log", lambda values: sent.append(values) or logged(values))
    mirrors.close()
    assert [(row["global_step"], row.get("train/loss")) for row in sent] == [
        (1, 2.0),
        (2, None),
        (3, 1.0),
    ]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_a_tracker_that_fails_is_a_warning(log, tmp_path, monkeypatch, caplog):
    class Broken:
        def __init__(self, run, folder):
            pass

        def write(self, values, step):
            raise OSError("the disk is full")

        def close(self):
            pass

    monkeypatch.setattr(module, "_WRITERS", {"tensorboard": Broken})
    caplog.set_level(logging.WARNING, "rayembed")
    mirrors = Mirrors(run_with("tensorboard"), tmp_path, log.path)
    mirrors.log_scores("eval", {"task": 0.5}, 3)
    mirrors.log_scores("eval", {"task": 0.6}, 4)
    mirrors.close()
    assert len(caplog.messages) == 1
    assert "the disk is full" in caplog.text


def test_what_is_not_installed_is_refused_with_its_extra(monkeypatch):
    check_mirrors(run_with("tensorboard"))
    monkeypatch.setattr("rayembed.errors.find_spec", lambda name: None)
    check_mirrors(run_with())
    with pytest.raises(ConfigError, match=r"pip install 'rayembed\[wandb\]'"):
        check_mirrors(run_with("wandb"))

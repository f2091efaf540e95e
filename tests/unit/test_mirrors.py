"""Copies of a run's curves in TensorBoard and Weights & Biases; the run does not depend on them."""

import json
import logging

import pytest

from rayembed.config.override import override
from rayembed.config.reports import MIRRORS, check_mirrors
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed_extras.mirrors.copies import Copy

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
        mirror = MIRRORS.get("tensorboard").open(run_with("tensorboard"), tmp_path, log.path)
        mirror.log_scores("eval", {"task": 0.5}, 3)
        mirror.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert losses == [(1, 2.0), (3, 1.0)], "a loss that is no number has no point"
    assert [(p.step, p.value) for p in found.Scalars("eval/task")] == [(3, 0.5)]


@pytest.mark.job  # its own process beside this one is reached by a Unix socket
def test_weights_and_biases_gets_the_same(log, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    mirror = MIRRORS.get("wandb").open(run_with("wandb"), tmp_path, log.path)
    writer = mirror._writer
    sent = []
    logged = writer._run.log
    monkeypatch.setattr(writer._run, "log", lambda values: sent.append(values) or logged(values))
    mirror.close()
    assert [(row["global_step"], row.get("train/loss")) for row in sent] == [
        (1, 2.0),
        (2, None),
        (3, 1.0),
    ]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_a_tracker_that_fails_is_a_warning(log, tmp_path, caplog):
    class Broken:
        def __init__(self, run, folder):
            pass

        def write(self, values, step):
            raise OSError("the disk is full")

        def close(self):
            pass

    caplog.set_level(logging.WARNING, "rayembed")
    mirror = Copy(Broken, run_with("tensorboard"), tmp_path, log.path)
    mirror.log_scores("eval", {"task": 0.5}, 3)
    mirror.log_scores("eval", {"task": 0.6}, 4)
    mirror.close()
    assert len(caplog.messages) == 1
    assert "the disk is full" in caplog.text


def test_what_is_not_installed_is_refused_with_its_extra(monkeypatch):
    check_mirrors(run_with("tensorboard").placement.mirrors)
    monkeypatch.setattr("rayembed.errors.find_spec", lambda name: None)
    check_mirrors(())
    with pytest.raises(ConfigError, match=r"pip install '\.\[wandb\]'"):
        check_mirrors(("wandb",))


def test_a_tracker_that_no_package_adds_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"placement\.mirrors.*'tensorbord'; did you mean"):
        run_with("tensorbord")


def test_a_tracker_that_cannot_be_opened_is_a_warning(log, tmp_path, caplog):
    def closed(run, folder):
        raise OSError("no login")

    mirror = Copy(closed, run_with(), tmp_path, log.path)
    mirror.log_scores("eval", {"task": 0.5}, 3)
    mirror.close()
    assert [*caplog.messages] == ["cannot copy this run's curves to closed: no login"]

"""Layers are compiled by themselves where a GPU gains by it, and where the stage is long enough."""

from types import SimpleNamespace

import pytest
import torch
from tiny_folders import tiny_parts, tiny_settings
from toy_model import ToyModel

from rayembed.config.placement import Placement
from rayembed.models.loading.build import build_model
from rayembed.training import compiling
from rayembed.training.compiling import compiles, stage_seconds

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    parts = tiny_parts("biencoder", tmp_path_factory.mktemp("parts"))
    return build_model(tiny_settings("biencoder"), parts, seed=1)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """An A100 with Triton and a C compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(compiling, "has_triton", lambda: True)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name == "gcc")


def stage(model, minutes):
    """A stage that is estimated to take this long on one worker."""
    steps = 1_000_000
    one = SimpleNamespace(name="first", steps=steps, global_rows=1)
    rows = minutes * 60 / stage_seconds(one, model, 1)
    return SimpleNamespace(name="first", steps=steps, global_rows=rows)


def test_a_long_stage_on_a_gpu_is_compiled_and_said(model, caplog):
    caplog.set_level("INFO")
    assert compiles(Placement(use_gpu=True), stage(model, 21), model, CUDA)
    assert "stage first: estimated to take 21 minutes; its layers are compiled" in caplog.text


@pytest.mark.parametrize(
    ("minutes", "changes", "patch", "reason"),
    [
        (19, {}, {}, "because compiling pays only for 20 minutes"),
        (21, {"zero_stage": 3}, {}, "zero_stage=3 partitions"),
        (21, {"expert_parallel": 2, "workers": 2}, {}, "expert_parallel exchanges"),
        (21, {}, {"capability": (7, 5)}, "compute capability is 7.5"),
        (21, {}, {"triton": False}, "Triton is not installed"),
        (21, {}, {"compiler": False}, "no C compiler"),
    ],
)
def test_what_forbids_it_is_said(model, minutes, changes, patch, reason, monkeypatch, caplog):
    caplog.set_level("INFO")
    if "capability" in patch:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: patch["capability"])
    if "triton" in patch:
        monkeypatch.setattr(compiling, "has_triton", lambda: False)
    if "compiler" in patch:
        monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
        monkeypatch.delenv("CC", raising=False)
    placement = Placement(use_gpu=True, **changes)
    assert not compiles(placement, stage(model, minutes), model, CUDA)
    assert reason in caplog.text


def test_a_model_without_layers_is_left_as_it_is():
    toy = ToyModel()
    assert not compiles(Placement(use_gpu=True), stage(toy, 21), toy, CUDA)


def test_cpus_never_compile_by_themselves_and_a_named_choice_holds(model, caplog):
    caplog.set_level("INFO")
    assert not compiles(Placement(), stage(model, 10_000), model, CPU)
    assert compiles(Placement(compile_layers=True), stage(model, 1), model, CPU)
    assert not compiles(Placement(compile_layers=False), stage(model, 10_000), model, CUDA)
    assert not caplog.text


def test_published_trainings_are_as_long_as_they_are(model):
    """BERT base, 256 pairs a step: 20 minutes are some 4,000 steps; 7B on 8 GPUs: 1,000 steps."""

    def minutes(parameters, rows, steps, workers):
        given = torch.nn.Module()
        given.weight = torch.nn.Parameter(torch.empty(parameters, device="meta"))
        run = SimpleNamespace(steps=steps, global_rows=rows)
        return stage_seconds(run, given, workers) / 60

    assert minutes(110_000_000, 256, 4000, 1) == pytest.approx(20, rel=0.1)
    assert minutes(7_100_000_000, 128, 1000, 8) == pytest.approx(20, rel=0.1)

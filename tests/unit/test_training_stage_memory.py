"""Memory that runs out in training: what is said, and what the next start keeps less of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from architecture_contract import STAGE
from own_pairs import own_run
from small_device import SmallDevice
from tiny_folders import TINY, tiny_parts, tiny_settings

from rayembed.config.data_run import data_of
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.data.prepare import prepare
from rayembed.errors import ArtifactError, DeviceMemoryError, may_pass
from rayembed.hardware import packed_tokens
from rayembed.models.build import build_model
from rayembed.models.layers import recomputable_layers
from rayembed.pipeline.here import Here
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.training import graph_room, stage_memory
from rayembed.training.graph_room import GraphRoom
from rayembed.training.here import train_stage_here
from rayembed.training.job import StageJob
from rayembed.training.stage_memory import MEMORY_FILE, MemoryPlan, StageMemory
from rayembed.training.step import EngineModule

STEPS, EVERY, FULL_AT = 6, 2, 4
RESULT = "weights.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and the folder of its stage's plan."""
    folder = tmp_path_factory.mktemp("full")
    settings = f"stages.finetune.steps={STEPS}", f"stages.finetune.checkpoint_every_steps={EVERY}"
    dropout = "model.backbone.hidden_dropout=0.3"
    run = own_run(folder, *settings, dropout, "data.datasets.pairs.held_out=null")
    return run, prepare(run, Here().data_context(data_of(run)))["finetune"]


def train(made, place: Path, device: SmallDevice | None = None, *settings: str):
    """Weights of the stage, and the number of each step that was done."""
    place.mkdir(exist_ok=True)
    run = override(made[0], settings) if settings else made[0]
    job = StageJob(run, 0, made[1], None, str(place / RESULT))
    if device is not None:
        job = replace(job, callbacks=(device,))
    train_stage_here(job, str(place), place / METRICS_FILE, 0)
    steps = [record["step"] for record in MetricsLog(place / METRICS_FILE).records()]
    return safetensors.torch.load_file(place / RESULT), steps


def planned(place: Path) -> dict:
    return json.loads((place / "train" / MEMORY_FILE).read_text())


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    return train(made, tmp_path_factory.mktemp("whole"))[0]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_next_start_keeps_less_and_ends_in_the_same_weights(made, whole, tmp_path, caplog):
    device = SmallDevice(FULL_AT)
    found, steps = train(made, tmp_path, device)
    assert_equal(found, whole)
    assert steps == list(range(1, STEPS + 1))
    assert (device.starts, device.held) == (2, 0)
    assert planned(tmp_path)["graph_bytes"] > 0
    (warning,) = [line for line in caplog.messages if "ran out of memory in" in line]
    for part in (
        f"stage 'finetune': rank 0 ran out of memory in step {FULL_AT}, with ",
        " tokens in a forward pass and ",
        " GiB are free",
        "The next start plans with less: at most",
        "Lower placement.micro_batch_tokens (1024), raise placement.zero_stage (",
        "PyTorch says: CUDA out of memory. Tried to allocate 2.00 GiB",
    ):
        assert part in warning


def test_without_a_smaller_plan_the_same_step_fails_at_every_start(made, tmp_path, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(MemoryPlan, "write", lambda *_: None)
    device = SmallDevice(FULL_AT)
    with pytest.raises(DeviceMemoryError, match=f"in step {FULL_AT}"):
        train(made, tmp_path, device)
    assert device.starts == 1 + Placement().max_failures


def test_plans_shrink_until_nothing_is_left_to_shrink(made, tmp_path, caplog):
    """Three quarters of the graphs, none of them, smaller passes; then it ends at once."""
    device = SmallDevice(FULL_AT, layers=99)
    with pytest.raises(DeviceMemoryError) as caught:
        train(made, tmp_path, device, "placement.max_failures=9")
    assert "Nothing smaller is planned" in str(caught.value)
    assert "placement.micro_batch_tokens (" not in str(caught.value)
    assert not may_pass(caught.value)
    assert device.starts == 4
    assert planned(tmp_path) == {"graph_bytes": 0, "micro_batch_tokens": 256}
    said = [line for line in caplog.messages if "The next start" in line]
    assert ["at most" in said[0], "one graph at" in said[1], "of 256 tokens" in said[2]] == [
        True
    ] * 3


def test_the_same_command_goes_on_with_less(made, whole, tmp_path):
    settings = ("placement.max_failures=0",)
    with pytest.raises(DeviceMemoryError) as caught:
        train(made, tmp_path, SmallDevice(FULL_AT), *settings)
    assert may_pass(caught.value)
    found, steps = train(made, tmp_path, SmallDevice(FULL_AT), *settings)
    assert_equal(found, whole)
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            ("placement.grad_cache=false", "placement.gradient_checkpointing=false"),
            "Set placement.grad_cache=auto (it is false), set placement.gradient_checkpointing="
            "auto (it is false), lower placement.micro_batch_tokens (1024)",
        ),
        (
            (
                "placement.grad_cache=true",
                "placement.gradient_checkpointing=true",
                "placement.micro_batch_tokens=512",
            ),
            "Lower placement.micro_batch_tokens (512), raise placement.zero_stage",
        ),
    ],
)
def test_what_the_run_names_is_kept_and_named(made, tmp_path, settings, advice):
    device = SmallDevice(FULL_AT, layers=99)
    with pytest.raises(DeviceMemoryError) as caught:
        train(made, tmp_path, device, *settings)
    assert advice in str(caught.value)
    assert device.starts == 1
    assert not (tmp_path / "train" / MEMORY_FILE).exists()


def test_memory_that_runs_out_before_the_first_step_is_named(made, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("rayembed.training.trainer.DeepSpeedEngine", full)
    with pytest.raises(DeviceMemoryError, match="ran out of memory outside its steps") as caught:
        train(made, tmp_path)
    assert not may_pass(caught.value)


def test_a_plan_that_is_damaged_is_named(tmp_path):
    assert MemoryPlan.read(str(tmp_path)) == MemoryPlan()
    MemoryPlan(8192, 10).write(str(tmp_path))
    assert MemoryPlan.read(str(tmp_path)) == MemoryPlan(8192, 10)
    (tmp_path / MEMORY_FILE).write_text('{"tokens": 3}')
    with pytest.raises(ArtifactError, match="is no memory plan"):
        MemoryPlan.read(str(tmp_path))


GIB = 2**30


@pytest.mark.parametrize(
    ("room", "megabytes", "expected"),
    [
        (100 * GIB, 0.34, 73_728),  # BERT base on an H200
        (55 * GIB, 0.34, 40_960),  # the same on 80 GB
        (50 * GIB, 6.8, 8192),  # 7B with LoRA
        (GIB, 6.8, 8192),
        (0, 6.8, 8192),
        (100 * GIB, 0.01, 131_072),
    ],
)
def test_a_packed_pass_takes_a_quarter_of_the_room(room, megabytes, expected):
    tokens = packed_tokens(room, megabytes * 1e6)
    assert tokens == expected
    if 8192 < tokens < 131_072:
        assert tokens * megabytes * 1e6 <= room / 4 < (tokens + 8192) * megabytes * 1e6


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """Settles a start's tokens of a pass on a GPU with so many free bytes, in the memory of this
    machine; the plan is kept in the test's folder.
    """
    monkeypatch.setattr(stage_memory, "to_device", lambda batch, _: batch)

    def settle(free, *, kind="biencoder", recompute="auto", unpadded="always", **placement):
        parts = tiny_parts(kind, tmp_path / "parts")
        model = build_model(tiny_settings(kind), parts, seed=1)
        model.unpadded = unpadded
        asked = Placement(use_gpu=True, **placement)
        memory = StageMemory(STAGE, asked, torch.device("cuda"), str(tmp_path))
        room = GraphRoom(torch.device("cuda"), model, recompute=recompute, to_come=lambda: 0)
        monkeypatch.setattr(graph_room, "free_memory", lambda _: free)
        state = torch.get_rng_state()
        tokens = memory.settle(room, model, EngineModule(model))
        assert torch.equal(torch.get_rng_state(), state), "training draws what it would have drawn"
        layers = recomputable_layers(model.trained_parts)
        assert {layer.gradient_checkpointing for layer in layers} == {recompute is True}
        return tokens

    return settle


def test_tokens_of_a_pass_go_by_memory_and_stay_for_the_stage(on_gpu, tmp_path, caplog):
    caplog.set_level("INFO", logger="rayembed")
    found = on_gpu(GIB)
    assert 8192 < found < 131_072
    assert caplog.messages[-1].startswith(f"{found:,} tokens in a forward pass: the graph of a tok")
    assert MemoryPlan.read(str(tmp_path)) == MemoryPlan(found)
    assert on_gpu(0) == found, "a stage that goes on, on a GPU with less free"
    (tmp_path / MEMORY_FILE).unlink()
    assert abs(on_gpu(GIB // 2, recompute=True) - found / 2) < 8192
    (tmp_path / MEMORY_FILE).unlink()
    assert on_gpu(0) == 8192
    assert on_gpu(GIB, micro_batch_tokens=300) == 300


@pytest.mark.parametrize("kind", TINY)
def test_a_pass_of_every_architecture_is_measured(on_gpu, kind):
    assert 8192 <= on_gpu(GIB, kind=kind) <= 131_072


def test_padded_passes_keep_the_smaller_number(on_gpu, tmp_path):
    assert on_gpu(400 * GIB, unpadded="never") == 8192
    assert not (tmp_path / MEMORY_FILE).exists()


def test_bytes_of_a_gpu_are_named(monkeypatch):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib // 2, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 70 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 75 * gib)
    assert stage_memory.memory_in_use("cuda") == (
        "70.00 GiB are allocated, 75.00 reserved by torch, and 0.50 of 80.00 free"
    )

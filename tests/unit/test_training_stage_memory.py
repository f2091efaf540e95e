"""Memory that runs out in training: what is said, and what the next start keeps less of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from architecture_contract import STAGE
from own_pairs import own_run
from pretended_gpu import pretended_gpu
from small_device import RAN_OUT, SmallDevice
from tiny_folders import TINY, tiny_parts, tiny_settings

from rayembed.config.data_run import data_of
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.data.prepare import prepare
from rayembed.errors import ArtifactError, DeviceMemoryError, may_pass
from rayembed.machine import hardware
from rayembed.machine.hardware import packed_tokens
from rayembed.models.layers import recomputable_layers
from rayembed.models.loading.build import build_model
from rayembed.pipeline.run.runtime import Here
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.training import trainer
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.here import train_here
from rayembed.training.job import StageJob
from rayembed.training.memory import graph_room, stage_memory
from rayembed.training.memory.graph_room import GraphRoom, Tokens
from rayembed.training.memory.stage_memory import MEMORY_FILE, MemoryPlan, StageMemory

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
    train_here(job, str(place), place / METRICS_FILE, 0)
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
    (warning,) = [line for line in caplog.messages if "ran out of memory in step" in line]
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
    caplog.set_level("INFO", logger="rayembed")
    device = SmallDevice(FULL_AT, layers=99)
    with pytest.raises(DeviceMemoryError) as caught:
        train(made, tmp_path, device, "placement.max_failures=9")
    kept = [
        line
        for line in caplog.messages
        if "ran out of memory in an earlier start, so it keeps fewer activations" in line
    ]
    assert "GiB of autograd graphs on a worker" in kept[0]
    assert "keeps fewer activations: GradCache, all layers recomputed (" in kept[1]
    assert "Nothing smaller is planned" in str(caught.value)
    assert "unless another process held the GPU" in str(caught.value)
    assert "placement.micro_batch_tokens (" not in str(caught.value)
    assert not may_pass(caught.value)
    assert device.starts == 4
    plan = planned(tmp_path)
    assert (plan["graph_bytes"], plan["micro_batch_tokens"]) == (0, 256)
    said = [line for line in caplog.messages if "The next start" in line]
    for line, smaller in zip(
        said,
        ["at most", "GradCache, all layers recomputed", "forward passes of 256 tokens"],
        strict=True,
    ):
        assert f"The next start plans with less: {smaller}" in line


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


@pytest.mark.parametrize("error", RAN_OUT[1:], ids=str)
def test_a_step_runs_out_of_memory_in_libraries_too(error, tmp_path):
    memory = StageMemory(STAGE, Placement(), torch.device("cpu"), str(tmp_path))
    with pytest.raises(DeviceMemoryError, match="in step 3") as caught, memory.step(3):
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(DeviceMemoryError, match="outside its"), memory.outside_steps():
        raise error
    other = RuntimeError("CUDA error: an illegal memory access was encountered")
    for place in (memory.step(3), memory.outside_steps()):
        with pytest.raises(RuntimeError, match="illegal"), place:
            raise other


def test_a_library_that_runs_out_of_memory_makes_the_next_start_keep_less(made, tmp_path):
    device = SmallDevice(FULL_AT, error=RAN_OUT[4])
    train(made, tmp_path, device)
    assert device.starts == 2
    assert planned(tmp_path)["graph_bytes"] > 0


@pytest.mark.parametrize("held", [2, 9])
def test_memory_that_runs_out_before_the_first_step_is_tried_again(
    held, made, whole, tmp_path, monkeypatch, caplog
):
    """As that of a worker that died just now: the stage starts again, within max_failures."""
    starts = []

    def full(*given, engine=trainer.DeepSpeedEngine):
        starts.append(1)
        if len(starts) <= held:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return engine(*given)

    monkeypatch.setattr(trainer, "DeepSpeedEngine", full)
    if held < 3:
        assert_equal(train(made, tmp_path)[0], whole)
    else:
        with pytest.raises(DeviceMemoryError, match="another process may hold the GPU") as caught:
            train(made, tmp_path)
        assert may_pass(caught.value)
        assert len(starts) == 1 + Placement().max_failures
    assert "ran out of memory outside its steps" in caplog.text
    assert "would fail alike" not in caplog.text
    assert not (tmp_path / "train" / MEMORY_FILE).exists()


def test_memory_that_runs_out_in_the_first_collective_is_named(made, tmp_path, monkeypatch):
    def full(*_):
        raise RAN_OUT[-1]

    monkeypatch.setattr(stage_memory, "largest", full)
    with pytest.raises(DeviceMemoryError, match="ran out of memory outside its steps"):
        train(made, tmp_path, None, "placement.max_failures=0")


OTHERS = {
    "workers": 2,
    "zero_stage": 3,
    "reduce_once": False,
    "grad_cache": True,
    "gradient_checkpointing": True,
    "micro_batch_tokens": 512,
    "unpadded": "never",
    "deterministic": True,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_of_other_settings_is_not_followed(name, tmp_path, caplog):
    caplog.set_level("INFO", logger="rayembed")
    device = torch.device("cpu")
    made = StageMemory(STAGE, Placement(), device, str(tmp_path))
    replace(made.plan, graph_bytes=0).write(str(tmp_path))
    assert StageMemory(STAGE, Placement(), device, str(tmp_path)).plan.graph_bytes == 0
    assert "GradCache, all layers recomputed" in caplog.messages[-1]
    other = parse(Placement, {name: OTHERS[name]})
    assert StageMemory(STAGE, other, device, str(tmp_path)).plan.graph_bytes is None
    was = getattr(Placement(), name)
    assert (
        f"have changed since it was made: {name} ({was}, now {OTHERS[name]})" in caplog.messages[-1]
    )


def test_a_plan_of_another_gpu_is_not_followed(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="rayembed")
    gpu = torch.device("cuda")
    with pretended_gpu(monkeypatch, total=141 << 30):
        made = StageMemory(STAGE, Placement(), gpu, str(tmp_path))
    replace(made.plan, graph_bytes=0, micro_batch_tokens=131_072).write(str(tmp_path))
    with pretended_gpu(monkeypatch, total=141 << 30):
        same = StageMemory(STAGE, Placement(), gpu, str(tmp_path)).plan
    assert (same.graph_bytes, same.micro_batch_tokens) == (0, 131_072)
    with pretended_gpu(monkeypatch, total=24 << 30):
        other = StageMemory(STAGE, Placement(), gpu, str(tmp_path)).plan
    assert (other.graph_bytes, other.micro_batch_tokens) == (None, None)
    assert "devices (['pretended of 141.0 GiB'], now ['pretended of 24.0 GiB'])" in caplog.text
    on_cpu = StageMemory(STAGE, Placement(), torch.device("cpu"), str(tmp_path))
    model = build_model(tiny_settings("biencoder"), tiny_parts("biencoder", tmp_path / "p"), seed=1)
    room = GraphRoom(torch.device("cpu"), model)
    assert on_cpu.settle(room, model, EngineModule(model)) == 1024


def test_a_plan_that_is_damaged_is_named(tmp_path):
    assert MemoryPlan.read(str(tmp_path)) == MemoryPlan()
    plan = MemoryPlan(8192, 10, {"devices": ["CPU"], "zero_stage": 2, "grad_cache": "auto"})
    plan.write(str(tmp_path))
    assert MemoryPlan.read(str(tmp_path)) == plan
    for damaged in ('{"tokens": 3}', '{"graph_bytes": 3, "measured_with": null}'):
        (tmp_path / MEMORY_FILE).write_text(damaged)
        with pytest.raises(ArtifactError, match="is not a valid memory plan"):
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

    def settle(
        free, *, kind="biencoder", recompute="auto", unpadded="always", gpu="H200", **placement
    ):
        monkeypatch.setattr(stage_memory, "device_label", lambda _: gpu)
        parts = tiny_parts(kind, tmp_path / "parts")
        model = build_model(tiny_settings(kind), parts, seed=1)
        model.unpadded = unpadded
        asked = Placement(use_gpu=True, gradient_checkpointing=recompute, **placement)
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
    assert caplog.messages[-1].startswith(f"forward passes have {found:,} tokens")
    assert MemoryPlan.read(str(tmp_path)).micro_batch_tokens == found
    assert on_gpu(0) == found, "a stage that goes on, on a GPU with less free"
    assert on_gpu(0, unpadded="never") == 8192, "as where the kernel is not there any more"
    assert on_gpu(0) == found
    assert abs(on_gpu(GIB // 2, recompute=True) - found / 2) < 8192
    assert on_gpu(GIB, recompute=True) < 0.6 * found, "a stage that goes on"
    assert on_gpu(0, gpu="L4") == 8192, "measured again"
    assert on_gpu(GIB, micro_batch_tokens=300) == 300


def test_where_bits_must_be_the_same_nothing_goes_by_free_memory(tmp_path, monkeypatch):
    for module in (graph_room, stage_memory, hardware):
        for name in ("free_memory", "_probe", "packed_tokens"):
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("asked"), raising=False)
    gpu, asked = torch.device("cuda"), Placement(use_gpu=True, deterministic=True)
    model = build_model(tiny_settings("biencoder"), tiny_parts("biencoder", tmp_path), seed=1)
    model.unpadded = "always"
    monkeypatch.setattr(stage_memory, "device_label", lambda _: "H200")
    memory = StageMemory(STAGE, asked, gpu, str(tmp_path))
    room = memory.room(model, lambda: pytest.fail("asked"))
    assert memory.settle(room, model, EngineModule(model)) == 8192
    fails = lambda: pytest.fail("measured")  # noqa: E731
    assert not room.keeps_graphs(fails, 1, Tokens(of_step=10**9, of_pass=8192))
    layers = recomputable_layers(model.trained_parts)
    assert all(layer.gradient_checkpointing for layer in layers)
    monkeypatch.setattr(stage_memory, "memory_in_use", lambda _: "little is free")
    with pytest.raises(DeviceMemoryError, match="Nothing smaller is planned"), memory.step(1):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert not (tmp_path / MEMORY_FILE).exists()
    named = asked.model_copy(update={"grad_cache": False, "gradient_checkpointing": False})
    room = StageMemory(STAGE, named, gpu).room(model, lambda: 0)
    assert room.keeps_graphs(fails, 1, Tokens(of_step=10**9, of_pass=8192))


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

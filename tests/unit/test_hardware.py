"""Which number type a machine computes fast, and that all rooms go by it."""

import logging
import subprocess
import sys

import pytest
import torch
from tiny_models import save_encoder

from rayembed.config.backbone import BackboneConfig
from rayembed.config.mining import Teacher
from rayembed.config.override import override
from rayembed.data.vectors.teacher import TeacherLoader, embedding_settings
from rayembed.errors import ArtifactError, ConfigError
from rayembed.machine import hardware
from rayembed.machine.hardware import (
    Precision,
    auto_precision,
    settled,
    step_processes,
    wide_enough,
)
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model, saved_dtype
from rayembed.pipeline.checks.precision import as_begun, run_settled
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.run_folder import check_run_folder, claim_run_folder
from rayembed.training.on_ray import worker_precision

HERE = Precision("float32", "this CPU emulates bfloat16 (9 times slower)")
ELSEWHERE = Precision("bfloat16", "this CPU has units for it (2.4 times float32)")


def here(_):
    """What a runtime answers on such a machine."""
    return HERE


def elsewhere(_):
    """What a runtime answers on such a machine."""
    return ELSEWHERE


H200, V100 = ("NVIDIA H200", (9, 0)), ("Tesla V100", (7, 0))


@pytest.fixture
def emulated(monkeypatch):
    """A CPU on which a product in bfloat16 takes nine times as long as in float32."""
    _forget()
    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: 1 / 9)
    yield
    _forget()


@pytest.fixture
def with_units(monkeypatch):
    _forget()
    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: 2.4)
    yield
    _forget()


class OfSize(torch.nn.Module):
    """A model of so many parameters, none of which takes memory."""

    def __init__(self, parameters: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(int(parameters), device="meta"))


@pytest.mark.parametrize(
    ("device", "parameters", "cores", "expected"),
    [
        ("cpu", 22e6, 64, 0),  # a process would take a core from the steps
        ("cuda", 22e6, 1, 0),
        ("cuda", 22e6, 4, 2),
        ("cuda", 22e6, 12, 3),
        ("cuda", 22e6, 64, 4),
        ("cuda", 110e6, 64, 3),  # reads 600,000 tokens a second
        ("cuda", 560e6, 64, 2),
        ("cuda", 7e9, 64, 0),  # reads 10,000
    ],
)
def test_processes_make_batches_where_a_gpu_reads_more_than_a_thread_makes(
    device, parameters, cores, expected
):
    assert step_processes(device, OfSize(parameters), cores) == expected


def _forget():
    hardware.say_once.cache_clear()


def test_a_cpu_that_emulates_bfloat16_gets_float32(emulated):
    assert str(auto_precision("cpu")) == "float32: this CPU emulates bfloat16 (9 times slower)"
    assert settled("auto", "cpu") == "float32"


def test_a_cpu_with_units_gets_bfloat16(with_units):
    assert str(auto_precision("cpu")) == ("bfloat16: this CPU has units for it (2.4 times float32)")
    assert settled("auto", "cpu") == "bfloat16"


@pytest.mark.parametrize(("gpu", "dtype"), [(H200, "bfloat16"), (V100, "float32")])
def test_gpus_go_by_their_capability(monkeypatch, emulated, gpu, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "_gpu", lambda device: gpu)
    assert auto_precision("cuda").dtype == auto_precision().dtype == dtype
    assert gpu[0] in auto_precision("cuda:1").why


def test_of_gpus_of_other_machines_bfloat16_is_expected(monkeypatch, emulated):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert auto_precision("cuda").dtype == "bfloat16"


def test_auto_is_said_once_and_a_slow_choice_warned_of_with_its_factor(emulated, caplog):
    caplog.set_level(logging.INFO, "rayembed.machine.hardware")
    assert [settled("auto", "cpu"), settled("auto", "cpu")] == ["float32", "float32"]
    assert settled("bfloat16", "cpu") == settled("bfloat16", "cpu") == "bfloat16"
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "float32: this CPU emulates bfloat16 (9 times slower)"),
        (
            "WARNING",
            "bfloat16 was asked for, but this CPU emulates bfloat16 (9 times slower); float32 or "
            "auto is faster",
        ),
    ]


def test_units_and_float32_are_no_reason_for_a_warning(with_units, caplog):
    caplog.set_level(logging.INFO, "rayembed.machine.hardware")
    assert settled("bfloat16", "cpu") == "bfloat16"
    assert settled("float32", "cpu") == "float32"
    assert not caplog.records


def test_the_measured_factor_follows_what_the_process_may_use():
    """A CPU is imitated by leaving its units out; where it has none, both are emulated."""
    code = "from rayembed.machine.hardware import bfloat16_speed; print(bfloat16_speed())"
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    run = ["env", *(f"{name}={value}" for name, value in limits.items()), sys.executable, "-c"]
    done = subprocess.run([*run, code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.7


def test_saved_weights_are_widened_only_where_bfloat16_is_emulated(emulated):
    assert [wide_enough("bfloat16"), wide_enough("float32")] == ["float32", "float32"]


def test_saved_weights_stay_as_they_are_where_there_are_units(with_units):
    assert [wide_enough("bfloat16"), wide_enough("float32")] == ["bfloat16", "float32"]


@pytest.mark.parametrize("speed", [1 / 9, 2.4])
def test_a_model_saved_in_bfloat16_loads_in_what_is_fast(monkeypatch, tmp_path, speed):
    backbone = save_encoder(tmp_path / "backbone")
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused", dtype="bfloat16"),
        query_max_length=20,
        document_max_length=20,
    )
    folder = tmp_path / "saved"
    build_model(config, backbone, seed=1).eval().save(folder)
    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: speed)
    model = load_model(folder)
    fast = torch.float32 if speed < 1 else torch.bfloat16
    assert next(model.parameters()).dtype == fast
    assert saved_dtype(folder) == "bfloat16"
    exact = load_model(folder, dtype="bfloat16")
    for wide, narrow in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_a_built_model_names_the_type_that_auto_became(emulated, tmp_path):
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused"), query_max_length=20, document_max_length=20
    )
    assert config.backbone.dtype == "auto"
    model = build_model(config, save_encoder(tmp_path / "backbone"), seed=0)
    assert model.config.backbone.dtype == "float32"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_teachers_vectors_are_named_by_the_type_in_which_they_were_made(emulated):
    config = Teacher(teacher="a")
    here = TeacherLoader().settled(config)
    there = TeacherLoader(precision=lambda: ELSEWHERE).settled(config)
    assert (here.dtype, there.dtype) == ("float32", "bfloat16")
    assert embedding_settings(here, "w") != embedding_settings(there, "w")
    fixed = config.model_copy(update={"dtype": "bfloat16"})
    assert TeacherLoader().settled(fixed) == fixed


def test_the_workers_nodes_are_asked(monkeypatch):
    from rayembed.config.placement import Placement
    from rayembed.training import on_ray

    asked = []

    class Task:
        def remote(self, device):
            asked.append(device)
            return Precision("float32", "so")

    monkeypatch.setattr(on_ray.ray, "remote", lambda **resources: lambda function: Task())
    monkeypatch.setattr(on_ray.ray, "get", lambda found, timeout: found)
    assert worker_precision(Placement(use_gpu=True)).dtype == "float32"
    assert asked == ["cuda"]


def test_a_run_goes_on_in_the_type_that_it_began_with(monkeypatch, tmp_path):
    run = get_recipe("biencoder")
    assert run.model.backbone.dtype == "auto"
    assert as_begun(run, tmp_path) == run
    begun = run_settled(as_begun(run, tmp_path), here)
    assert begun.model.backbone.dtype == "float32"
    claim_run_folder(tmp_path, begun)

    again = run_settled(as_begun(run, tmp_path), elsewhere)
    assert check_run_folder(tmp_path, again)
    assert again.model.backbone.dtype == "float32"
    # Without a look at the folder it would be another run.
    with pytest.raises(ArtifactError, match="another run"):
        check_run_folder(tmp_path, run_settled(run, elsewhere))


def test_a_model_that_is_loaded_as_saved_has_asked_for_no_type(monkeypatch, tmp_path, caplog):
    backbone = save_encoder(tmp_path / "backbone")
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused", dtype="bfloat16"),
        query_max_length=20,
        document_max_length=20,
    )
    build_model(config, backbone, seed=1).eval().save(tmp_path / "saved")
    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: 0.1)
    hardware.say_once.cache_clear()
    caplog.clear()
    load_model(tmp_path / "saved")
    assert "was asked for" not in caplog.text
    hardware.settled("bfloat16", "cpu")
    assert "bfloat16 was asked for" in caplog.text


def test_the_type_of_a_run_is_said_in_one_line(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "rayembed.pipeline.checks.precision")
    run = get_recipe("biencoder")
    run_settled(run, here)
    run_settled(override(run, ["model.backbone.dtype=bfloat16"]), here)
    run_settled(override(run, ["model.backbone.dtype=float32"]), here)
    assert [record.message for record in caplog.records] == [
        "model.backbone.dtype=auto: using float32: this CPU emulates bfloat16 (9 times slower)",
        "model.backbone.dtype is bfloat16, but this CPU emulates bfloat16 (9 times slower) on the "
        "workers' nodes; training would be faster in a new run with model.backbone.dtype=auto or "
        "float32",
    ]


def test_settings_that_do_not_go_together_in_the_type_are_refused(monkeypatch):
    asked = ["placement.workers=2", "placement.expert_parallel=2", "placement.zero_stage=0"]
    run = override(get_recipe("nomic-quickstart"), asked)
    run_settled(run, here)
    with pytest.raises(ConfigError, match="zero_stage 0 in bfloat16"):
        run_settled(run, elsewhere)


@pytest.mark.parametrize("first_form", [False, True])
def test_free_memory_is_what_the_container_still_allows(monkeypatch, tmp_path, first_form):
    names = hardware._CONTAINER_MEMORY[first_form]
    texts = ("900000\n", "700000\n", "anon 5\ninactive_file 100000\n")
    for name, text in zip(names, texts, strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(hardware, "_CONTAINER", tmp_path)
    assert hardware.free_memory("cpu") == 300000
    (tmp_path / names[0]).write_text("max\n")
    assert hardware.free_memory("cpu") > 10**8

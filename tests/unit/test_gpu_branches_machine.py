"""What a process asks of its GPU and settles by it, with a GPU that is not there.

`test_gpu_gate.py` runs this file beside `test_gpu_branches.py`.
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from every_loss import stage_of
from pretended_gpu import GPU, OnGpu, pretended_gpu
from torch import nn
from toy_model import ToyModel

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.data.mining import rescoring
from rayembed.errors import PlacementError
from rayembed.machine import hardware
from rayembed.machine.device import CUBLAS, check_deterministic_start, gpus_here
from rayembed.models.adapters import adapted_linear, adapter_bits
from rayembed.training import here
from rayembed.training.compiling import compiles
from rayembed.training.memory import stage_memory
from rayembed.training.memory.stage_memory import StageMemory

CPU = torch.device("cpu")


def test_gpus_of_a_machine_are_named(monkeypatch):
    assert gpus_here().number == 0
    with pretended_gpu(monkeypatch):
        seen = gpus_here()
    assert (seen.number, seen.text) == (1, "this machine has 1 GPU (pretended)")


def test_deterministic_sums_must_be_asked_for_before_a_gpu_is_used(monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    with (
        pretended_gpu(monkeypatch),
        pytest.raises(PlacementError, match="this process has already used its GPU"),
    ):
        check_deterministic_start()
    check_deterministic_start()
    assert os.environ[CUBLAS]
    monkeypatch.delenv(CUBLAS)


def test_products_are_rounded_on_gpus_alone(monkeypatch):
    before = torch.get_float32_matmul_precision()
    for dtype, device, inside in (("tf32", "cuda", "high"), ("tf32", "cpu", before)):
        with hardware.rounded_products(dtype, device):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == before


def test_memory_in_use_is_told_of_either_device(monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    hardware.release_memory()
    assert freed
    assert hardware.memory_in_use("cpu").endswith("GiB are free")
    with pretended_gpu(monkeypatch, free=3 << 30, total=8 << 30):
        assert hardware.memory_in_use("cuda").endswith("and 3.00 of 8.00 free")


def test_processes_make_batches_for_a_gpu(monkeypatch):
    assert hardware.step_processes("cpu", nn.Linear(4, 4), 16) == 0
    assert hardware.step_processes("cuda", nn.Linear(4, 4), 16) > 0


@pytest.mark.parametrize("works", [True, False])
def test_dropout_keeps_bits_on_gpus_whose_kernels_work(works, monkeypatch):
    asked = []
    answer = lambda *given: asked.append(given) or works  # noqa: E731
    monkeypatch.setattr(adapted_linear, "kernels_work", answer)
    on_cpu = torch.zeros(2)
    assert not adapted_linear.keeps_bits(on_cpu, 16)
    assert not asked
    assert adapted_linear.keeps_bits(on_cpu.as_subclass(OnGpu), 16) is works
    assert asked == [(GPU, torch.float32, 16)]
    assert adapted_linear.keeps_bits(on_cpu.to("meta"), 16)


def test_kernels_of_a_gpu_that_is_not_there_do_not_work(caplog):
    for known in (adapter_bits._why_not, hardware.say_once):
        known.cache_clear()
    assert not adapter_bits.kernels_work(GPU, torch.bfloat16, 16)
    assert "Triton's kernels fail on cuda:0" in caplog.text


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_layers_are_left_as_they_are_where_compiling_gains_nothing(capability, monkeypatch):
    model, stage = ToyModel(context=False), stage_of({})
    assert not compiles(Placement(), stage, model, CPU)
    with pretended_gpu(monkeypatch, capability):
        assert not compiles(Placement(), stage, model, GPU)


GROUPS = {"cpu:gloo,cuda:nccl": None, "cpu:gloo,cuda:gloo": "cuda", "cuda:nccl": "cpu"}


@pytest.mark.parametrize("backends", GROUPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_whose_group_is_for_the_other_device_is_refused(device, backends, monkeypatch):
    monkeypatch.setitem(sys.modules, here._ACCELERATOR, SimpleNamespace(ds_accelerator=None))
    monkeypatch.setenv("DS_ACCELERATOR", "before")
    for name, answer in (("is_initialized", True), ("get_backend_config", backends)):
        monkeypatch.setattr(here.dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(here.dist, "get_backend", lambda: backends)
    if GROUPS[backends] != device:
        here.take_device(device)
        assert os.environ["DS_ACCELERATOR"] == device
        return
    asked = f"placement.use_gpu={str(device == 'cuda').lower()}"
    with pytest.raises(PlacementError, match=f"{asked} trains on '{device}'.*Start a new process"):
        here.take_device(device)
    assert os.environ["DS_ACCELERATOR"] == "before"


def test_packed_passes_of_a_gpu_have_what_memory_holds(monkeypatch):
    monkeypatch.setattr(StageMemory, "_all_pack", lambda *_: True)
    monkeypatch.setattr(stage_memory, "_probe", lambda *_: (None, 100))
    room, model = (
        SimpleNamespace(pass_tokens=lambda forward, measured: 77_777),
        ToyModel(context=False),
    )
    placement = parse(Placement, {})
    for device, expected in ((GPU, 77_777), (CPU, hardware.micro_batch_tokens("cpu"))):
        memory = StageMemory(stage_of({}), placement, device)
        assert memory.settle(room, model, model) == expected


class Loaded(Exception):
    """In place of a model."""


def test_rerankers_leave_the_cpu_alone_where_a_gpu_scores(tmp_path, monkeypatch):
    asked, threads = [], []

    def model(folder, device, local_files_only):
        asked.append(device)
        raise Loaded

    monkeypatch.setattr("sentence_transformers.CrossEncoder", model)
    monkeypatch.setattr(rescoring, "check_cross_encoder", lambda *_: None)
    monkeypatch.setattr(rescoring, "resolve_model", lambda _: tmp_path)
    monkeypatch.setattr(rescoring, "take_free_threads", threads.append)
    for device in ("cpu", "cuda"):
        with pytest.raises(Loaded):
            rescoring._model("reranker", 40, device, "float32")
    assert asked == ["cpu", "cuda"]
    assert threads == ["a reranker"]
    monkeypatch.setattr(rescoring, "_model", lambda *_: SimpleNamespace(tokenizer=None))
    for device in ("cpu", "cuda"):
        assert callable(rescoring._load.__wrapped__("reranker", "w", 40, device, "float32"))

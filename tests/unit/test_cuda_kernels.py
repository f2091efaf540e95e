"""All operators of steps, encoding and searches have CUDA kernels in the installed torch."""

import dataclasses

import numpy as np
import pytest
import torch
from every_loss import LOSSES, stage_of
from made_up_records import made_up_records
from made_up_teachers import TEACHERS
from operators import Operators, has_cuda_kernel
from tiny_folders import TINY, tiny_parts, tiny_settings
from toy_model import ToyModel
from varlen_on_cpu import varlen_on_cpu

from rayembed.config.loss import Widths
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.experts import ExpertMlps
from rayembed.models.loading.build import build_model
from rayembed.models.passes.encoding import encode
from rayembed.search import tiles
from rayembed.search.exact import top_k
from rayembed.search.tiles import Tiles, documents_above
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

OF_CPUS = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
}
"""SDPA's kernel of CPUs; a GPU takes one of its own."""

OF_VARLEN = {"torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"}


def check(operators, more=frozenset()):
    names = operators.names - OF_CPUS - more
    assert names
    assert {name for name in names if not has_cuda_kernel(name)} == set()
    assert not operators.atomic


def step(model, *, cache, stage=None, budget=90):
    stage = stage or stage_of({})
    records = [dataclasses.replace(r, similarity=0.5) for r in made_up_records(8)]
    taught = TEACHERS if stage.teachers else ()
    batch = make_step_batch(0, records, stage.batch.num_negatives, model.tokenizer, taught)
    widths = Widths(model.dimensions[0], tuple(teacher.width for teacher in taught))
    engine, back = EngineModule(model, stage.loss, widths.teachers), lambda x, last: x.backward()
    settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
    run_step(model, engine, back, batch, stage, settings)


@pytest.mark.parametrize("kind", TINY)
def test_of_steps_and_encoding(kind, tmp_path, monkeypatch):
    lora = {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1}} if kind == "nvembed" else {}
    model = build_model(tiny_settings(kind, **lora), tiny_parts(kind, tmp_path), seed=1)
    model = model.to(torch.bfloat16).train()
    for module in model.modules():
        if isinstance(module, ExpertMlps):
            module.products = "grouped"
    with Operators() as operators:
        model.unpadded = "never"
        step(model, cache=False)
        model.unpadded = "always"
        with varlen_on_cpu(monkeypatch):
            for cache in (False, True):
                step(model, cache=cache)
            encode(model.eval(), ["a text", "another of more words"], role="document")
    check(operators, OF_VARLEN)
    assert operators.names > OF_VARLEN
    assert all(has_cuda_kernel(f"aten._flash_attention_{name}") for name in ("forward", "backward"))


@pytest.mark.parametrize(("name", "in_batch"), [*((n, True) for n in LOSSES), ("infonce", False)])
def test_of_losses(name, in_batch):
    with Operators() as operators:
        step(ToyModel(context=True), cache=True, stage=stage_of(LOSSES[name], in_batch=in_batch))
    check(operators)


def test_of_pairs():
    with Operators() as operators:
        stage = stage_of({"kind": "cosent"}, in_batch=False, negatives=0)
        step(ToyModel(context=False), cache=False, stage=stage)
    check(operators)


def test_of_searches(monkeypatch):
    monkeypatch.setattr(tiles, "rounds_first", lambda _: True)
    draw = np.random.default_rng(0)
    queries, documents = (draw.standard_normal((n, 32)).astype(np.float32) for n in (64, 5000))
    with Operators() as operators:
        for shards in ([documents], [documents.astype(np.float16)], [documents[:40], documents]):
            top_k(queries, shards, 10)
        given, lowest = torch.from_numpy(queries), torch.ones(len(queries))
        list(documents_above(given, given, lowest, Tiles(5000, 40, 21, 3)))
    check(operators)


def test_the_control_an_operator_of_cpus_alone_is_seen():
    assert not any(map(has_cuda_kernel, OF_CPUS))
    assert not has_cuda_kernel("aten.mkldnn_linear.default")
    assert has_cuda_kernel("aten.add.Tensor")
    assert has_cuda_kernel("aten.matmul.default")
    with pytest.raises(KeyError):
        has_cuda_kernel("aten.no_such_operator.default")
    with Operators() as operators:
        torch.zeros(2, 2).to_mkldnn()
        total = torch.zeros(2, dtype=torch.bfloat16)
        total.index_add_(0, torch.zeros(2, dtype=torch.int64), total.clone())
    assert any(not has_cuda_kernel(name) for name in operators.names)
    with pytest.raises(AssertionError):
        check(operators)
    assert operators.atomic

"""Compiled layers compute what they compute uncompiled."""

import pytest
import torch
from architecture_contract import STAGE, moved
from made_up_records import made_up_records
from tiny_folders import tiny_parts, tiny_settings

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.models import varlen
from rayembed.models.build import build_model
from rayembed.training.step import EngineModule, StepSettings, run_step


def built(kind, folder, dropout):
    """A tiny model in training mode, with hidden dropout or that of adapters."""
    if kind == "biencoder":
        changes = {"backbone": {"path": "given", "dtype": "float32", "hidden_dropout": dropout}}
    else:
        changes = {"lora": {"rank": 2, "alpha": 4, "dropout": dropout}}
    model = build_model(tiny_settings(kind, **changes), tiny_parts(kind, folder), seed=1)
    moved(model).unpadded = "always"
    return model.train()


def gradients(model, budget, cache):
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)
    model.zero_grad()
    torch.manual_seed(1)
    settings = StepSettings(budget, cache, torch.device("cpu"))
    back = lambda loss, last: loss.backward()  # noqa: E731
    run_step(model, EngineModule(model), back, batch, STAGE, settings)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(left, right):
    size = max(gradient.abs().max() for gradient in right.values())
    assert left.keys() == right.keys()
    assert max((left[n] - right[n]).abs().max() for n in right) < 1e-5 * size


@pytest.fixture
def kernel(monkeypatch):
    """Attention is no part of the graphs, as torch's kernel is none; the reference would be one for
    each list of lengths."""
    monkeypatch.setattr(varlen, "reference", torch.compiler.disable(varlen.reference))


def check(kind, folder, backend):
    """Gradients with dropout, cached over micro-batches of many lengths, and the graphs made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    names = list(built(kind, folder, 0.5).state_dict())
    expected = gradients(built(kind, folder, 0.5), 60, cache=True)
    model = built(kind, folder, 0.5)
    model.compile_layers(backend)
    assert list(model.state_dict()) == names
    same(gradients(model, 60, cache=True), expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    gradients(model, 45, cache=True)
    again = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert again == graphs, "other lengths and the other layer take the same graphs"
    without = gradients(built(kind, folder, 0.0), 60, cache=True)
    assert max((without[n] - expected[n]).abs().max() for n in expected) > 1e-3, "dropout matters"


def test_compiled_layers_give_the_same_gradients_by_few_graphs(tmp_path, kernel):
    check("biencoder", tmp_path, "aot_eager")


@pytest.mark.slow("a compiler works for a minute")
def test_fused_layers_give_the_same_gradients(tmp_path, kernel):
    check("nvembed", tmp_path, "inductor")


def test_partitioned_weights_are_not_compiled():
    assert parse(Placement, {"compile_layers": True, "zero_stage": 2}).compile_layers
    with pytest.raises(ConfigError, match="compile_layers needs whole weights"):
        parse(Placement, {"compile_layers": True, "zero_stage": 3})

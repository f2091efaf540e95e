"""GradCache: same gradients as one graph, however the batch is cut, dropout included."""

import contextlib
import logging

import pytest
import torch
from made_up_records import made_up_records
from plain_reference import reference_loss
from torch.utils.checkpoint import checkpoint
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.distributed import grad_cache
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.memory import graph_room
from rayembed.training.memory.graph_room import GraphRoom, graph_bytes
from rayembed.training.objective import StepSettings


def stage(*, in_batch: bool = True, pairs: int = 24) -> StageConfig:
    return parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {"global_pairs": pairs, "num_negatives": 2, "in_batch_negatives": in_batch},
            "loss": {"temperature": 0.1},
            "optimizer": {"learning_rate": 0.1},
            "steps": 1,
        },
    )


def gradients(
    model: ToyModel, *, budget: int, cache: bool | GraphRoom, in_batch: bool = True, seed: int = 1
):
    records = made_up_records(24)
    batch = make_step_batch(0, records, 2, model.tokenizer)
    model.zero_grad()
    torch.manual_seed(seed)
    settings = StepSettings(micro_batch_tokens=budget, grad_cache=cache, device=torch.device("cpu"))
    report = run_step(
        model,
        EngineModule(model),
        lambda loss, last: loss.backward(),
        batch,
        stage(in_batch=in_batch),
        settings,
    )
    return report, {n: p.grad.clone() for n, p in model.named_parameters()}, torch.get_rng_state()


def assert_same(left: dict, right: dict, tolerance: float = 2e-6) -> None:
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], atol=tolerance, rtol=1e-5, msg=name)


MODELS = {
    "plain": {},
    "context": {"context": True},
    "statistics": {"experts": 3},
    "all": {"context": True, "experts": 3},
}


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("in_batch", [True, False])
def test_step_equals_a_loop_over_texts(parts, in_batch):
    model = ToyModel(**parts)
    report, found, _ = gradients(model, budget=40, cache=True, in_batch=in_batch)
    assert report.micro_batches > 5
    model.zero_grad()
    loss = reference_loss(
        model, made_up_records(24), temperature=0.1, num_negatives=2, in_batch=in_batch
    )
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), abs=1e-5)
    assert_same(found, {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS.keys())
def test_cuts_and_cache_change_nothing(parts):
    model = ToyModel(**parts)
    _, whole, _ = gradients(model, budget=10**6, cache=False)
    for budget, cache in [(13, True), (40, True), (40, False), (10**6, True)]:
        _, cut, _ = gradients(model, budget=budget, cache=cache)
        assert_same(whole, cut)


def passes_of(model, room, monkeypatch, free, **given):
    """Gradients of a step with so much free memory, and how many passes it took of the texts."""
    count = 0

    def counted(*_):
        nonlocal count
        count += 1

    monkeypatch.setattr(graph_room, "free_memory", lambda device: free)
    hook = model.register_forward_hook(counted)
    found = gradients(model, budget=40, cache=room, **given)
    hook.remove()
    return count, found


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS.keys())
def test_graphs_are_kept_where_they_fit_and_cached_beyond(parts, monkeypatch, caplog):
    model = ToyModel(dropout=0.5, **parts)
    report, expected, after = gradients(model, budget=40, cache=False)
    caplog.set_level(logging.INFO)
    states = 12 * sum(parameter.numel() for parameter in model.parameters())
    for free, passes in [(states + 10**6, 1), (states + 2000, 2), (0, 2)]:
        room = GraphRoom(torch.device("cpu"), model)
        count, (_, found, state) = passes_of(model, room, monkeypatch, free)
        assert count == 1 + passes * report.micro_batches  # one is measured
        assert_same(expected, found)
        assert torch.equal(state, after), "the measured pass draws no random numbers"
        again, _ = passes_of(model, room, monkeypatch, 0)
        assert again == passes * report.micro_batches  # and once only
    assert "GradCache is used for steps" in caplog.text


def test_a_longer_text_takes_more_and_recomputed_layers_less():
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    given = torch.randn(10, 8)
    plain = graph_bytes(lambda: model(given))
    assert plain == 10 * (64 + 64 + 8) * 4
    assert graph_bytes(lambda: model(torch.cat([given, given]))) == 2 * plain + 2 * 10 * 8 * 4
    recomputed = graph_bytes(lambda: checkpoint(model, given, use_reentrant=False))
    assert recomputed == 10 * 8 * 4


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS.keys())
def test_dropout_is_replayed(parts):
    model = ToyModel(dropout=0.5, **parts)
    _, one_graph, after = gradients(model, budget=40, cache=False)
    _, cached, after_cached = gradients(model, budget=40, cache=True)
    assert_same(one_graph, cached)
    assert torch.equal(after, after_cached), "the random stream goes on as after plain passes"


def test_without_replay_gradients_are_wrong(monkeypatch):
    """The control: the test above fails when the second pass draws new random numbers."""
    model = ToyModel(dropout=0.5)
    _, one_graph, _ = gradients(model, budget=40, cache=False)
    monkeypatch.setattr(grad_cache, "replayed", lambda state: contextlib.nullcontext())
    _, cached, _ = gradients(model, budget=40, cache=True)
    assert max((one_graph[n] - cached[n]).abs().max() for n in cached) > 1e-3

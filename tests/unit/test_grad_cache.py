"""GradCache: same gradients as one graph, however the batch is cut, dropout included."""

import contextlib

import pytest
import torch
from made_up_records import made_up_records
from plain_reference import reference_loss
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.distributed import grad_cache
from rayembed.training.step import EngineModule, StepSettings, run_step


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


def gradients(model: ToyModel, *, budget: int, cache: bool, in_batch: bool = True, seed: int = 1):
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

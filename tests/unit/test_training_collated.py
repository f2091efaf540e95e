"""Batches are collated by a thread ahead of their step, which asks its device for values once."""

import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from made_up_records import made_up_records
from tiny_folders import TINY, tiny_parts, tiny_settings
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import DataError
from rayembed.machine.ahead import done_ahead
from rayembed.models.loading.build import build_model
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import CONTRASTIVE, run_step
from rayembed.training.objective import StepSettings

STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"kind": "siglip"},
        "optimizer": {"learning_rate": 0.01},
        "steps": 2,
    },
)
READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "nonzero")
"""By what of a tensor the host waits for a device."""


def settings(cache=True):
    return StepSettings(70, cache, torch.device("cpu"), pass_cost_tokens=1)


def model():
    return ToyModel(context=True, experts=3)


def batch(toy):
    return make_step_batch(0, made_up_records(8), 2, toy.tokenizer)


@contextmanager
def counted(monkeypatch):
    """Names of the reads of tensors, but for those of `read_together` and of what it gives."""
    seen, quiet = [], [False]

    def counting(name, read):
        def told(*args, **kwargs):
            if not quiet[0]:
                seen.append(name)
            return read(*args, **kwargs)

        return told

    def together(*tensors):
        quiet[0] = True  # what comes after it is on the CPU
        seen.append("together")
        return read_together(*tensors)

    read_together = step_module.read_together
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "read_together", together)
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield seen


@pytest.mark.parametrize("cache", [True, False])
def test_a_step_reads_from_its_device_once(monkeypatch, cache):
    toy = model()
    ready = CONTRASTIVE.ahead(toy, batch(toy), STAGE, settings())
    assert len(ready.micro_batches) >= 5
    backward = lambda loss, last: loss.backward()  # noqa: E731  as short as it is
    with counted(monkeypatch) as seen:
        report = run_step(
            toy, EngineModule(toy, STAGE.loss), backward, ready, STAGE, settings(cache)
        )
    assert seen == ["together"]
    assert report.metrics.keys() == {"loss_log_scale", "loss_bias"}
    with counted(monkeypatch) as seen:
        run_step(toy, EngineModule(toy, STAGE.loss), told(backward), ready, STAGE, settings(cache))
    assert len(seen) > 1, "the control: a read in each backward pass"


def told(backward):
    def reads(loss, last):
        backward(loss, last)
        assert float(loss) == float(loss)

    return reads


def test_a_batch_collated_ahead_gives_the_same_gradients():
    found = []
    for ahead in (True, False):
        toy = model()
        given = batch(toy)
        if ahead:
            given = CONTRASTIVE.ahead(toy, given, STAGE, settings())
        engine = EngineModule(toy, STAGE.loss)
        report = run_step(toy, engine, lambda loss, last: loss.backward(), given, STAGE, settings())
        found.append((report, [p.grad for p in engine.parameters()]))
    (left, ours), (right, theirs) = found
    assert left == right
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_items_are_worked_on_ahead_in_their_order_by_another_thread():
    began, used, closed = threading.Event(), [], threading.Event()

    def items():
        try:
            yield from range(5)
        finally:
            closed.set()

    def work(item):
        used.append(threading.current_thread())
        if item == 2:
            began.set()
        return 10 * item

    results = done_ahead(work, items(), read_ahead=1)
    assert next(results) == 0
    assert began.wait(10), "while the first result is used, those after it are made"
    assert list(results) == [10, 20, 30, 40]
    assert threading.main_thread() not in used
    assert closed.is_set()


def test_an_early_end_closes_the_items_and_an_error_comes_in_its_turn():
    closed = threading.Event()

    def items(error=None):
        try:
            yield 1
            if error is not None:
                raise error
            while True:
                yield 2
        finally:
            closed.set()

    results = done_ahead(partial(pow, 2), items(), read_ahead=1)
    assert next(results) == 2
    results.close()
    assert closed.wait(10)
    failing = done_ahead(partial(pow, 2), items(DataError("broken")), read_ahead=4)
    assert next(failing) == 2
    with pytest.raises(DataError, match="broken"):
        next(failing)


@pytest.mark.parametrize("kind", TINY)
def test_a_filler_uses_all_that_a_micro_batch_uses(kind, tmp_path, monkeypatch):
    """A worker reduces the gradients that it has: with fewer than others it would reduce others."""
    model = build_model(tiny_settings(kind), tiny_parts(kind, tmp_path), seed=1).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    used = []

    def backward(loss, last):
        loss.backward()
        used.append(frozenset(name for name, p in trained.items() if p.grad is not None))
        model.zero_grad()

    def needed(ready, everyone, device):
        more = {"passes": 2, "context_passes": 2 if model.uses_context else 0}
        own = ready.needed
        return own._replace(**{n: getattr(own, n) + more[n] for n in more}), ready.repeated

    monkeypatch.setattr(step_module, "_of_all_workers", needed)
    engine = EngineModule(model, STAGE.loss)
    back = partial(run_step, model, engine, backward, batch(model), STAGE)
    report = back(settings(cache=True))
    assert len(used) >= report.micro_batches
    kinds = set(used)
    assert len(kinds) == 1 + model.uses_context, "passes over texts, passes over the context"
    assert frozenset.union(*kinds) == set(trained)

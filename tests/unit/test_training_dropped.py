"""Steps whose loss or gradient is not finite: counted, told, and the end of a run in a row."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from made_up_records import made_up_records
from told import Told
from toy_model import ToyModel

from rayembed.config.placement import Placement
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import DivergenceError
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import CONTRASTIVE, run_step
from rayembed.training.dropped import mean_of_finite, without_gradient_unless_finite
from rayembed.training.objective import Objective, StepReport, StepSettings
from rayembed.training.trainer import StageTrainer

CPU = torch.device("cpu")
STEPS = 12
NAN, INF = math.nan, math.inf


class Engine:
    """Has the norms that it is given."""

    model = torch.nn.Linear(1, 1)
    forward = model

    def __init__(self, norms):
        self.norms = iter(norms)

    def backward(self, loss, last):
        raise AssertionError("nothing is learnt")

    def step(self, factor):
        return factor, next(self.norms)

    def written_states(self):
        return iter(())


class Nothing(Objective):
    """Steps in which nothing is done.

    Args:
        trace: option of the job that shows the rows of a step.
    """

    def __init__(self, trace):
        self.trace = trace

    def batches(self, plan, model, stage, seed):
        return lambda step: SimpleNamespace(step=step)

    def run_step(self, *_):
        return StepReport(1.0, 1, 1, 1, 1, {})

    def source(self, plan, step):
        return f"set {step}"


def train(dropped_steps, *, every=4, limit=5, first=0, count=0, trace="", **asked):
    """Steps with a checkpoint, records, and the error's text."""
    stage = get_recipe("biencoder").stages[0]
    stage = stage.model_copy(update={"steps": STEPS, "checkpoint_every_steps": every})
    norms = [INF if step in dropped_steps else 1.0 for step in range(first + 1, STEPS + 1)]
    saved, records, text = [], [], None
    try:
        trainer = StageTrainer(
            stage,
            Placement(end_after_dropped_steps=limit),
            Engine.model,
            Nothing(trace),
            SimpleNamespace(fingerprint="plan", teachers=()),
            seed=0,
            callbacks=[Told(on_step=records.append, on_checkpoint=saved.append, **asked)],
        )
        trainer.train(Engine(norms), StepSettings(1, True, CPU), first, count)
    except DivergenceError as error:
        text = str(error)
    return saved, records, text


def test_a_dropped_step_is_counted_and_the_first_one_is_told(caplog):
    saved, records, text = train({3, 6, 7})
    assert text is None
    assert saved == [4, 8, 12]
    assert [r["dropped_steps"] for r in records] == [0, 0, 1, 1, 1, 2, *[3] * 6]
    (line,) = caplog.messages
    assert "stage finetune: step 3 is dropped (loss 1, gradient norm inf, learning rate" in line
    assert "batch of set 2" in line
    assert caplog.records[0].levelno == logging.WARNING


def test_without_a_dropped_step_nothing_is_told(caplog):
    saved, records, text = train(set())
    assert (saved, text, caplog.messages) == ([4, 8, 12], None, [])
    assert {r["dropped_steps"] for r in records} == {0}


def test_no_checkpoint_is_made_in_a_row_and_it_is_made_up_for():
    assert train({7, 8, 9})[0] == [4, 10, 12]
    asked = iter([True, *[False] * 20])
    assert train({1, 2}, saves_now=lambda: next(asked))[0] == [3, 4, 8, 12]


def test_so_many_in_a_row_end_the_run_and_leave_the_last_checkpoint():
    saved, records, text = train({5, 6, 7, 8, 9}, every=1)
    assert saved == [1, 2, 3, 4]
    assert len(records) == 9, "the last step is in the log too"
    assert "stage 'finetune': the steps 5 to 9 were dropped" in text
    assert "The checkpoint of step 4 is kept" in text
    assert "loss 1, gradient norm inf" in text
    assert "batch of set 8" in text
    assert train({5, 6, 7, 8, 10, 11}, every=1)[2] is None, "not in a row"
    assert "another --name." in text.splitlines()[-1]
    assert "look at their rows" not in text, "this job has no option for it"
    traced = train({5, 6, 7, 8, 9}, trace=CONTRASTIVE.trace)[2]
    assert "look at their rows (add --trace-batch finetune:8 to the training command)" in traced
    assert "No checkpoint was made before" in train({1, 2}, limit=2)[2]
    assert train({1}, limit=2)[2] is None
    assert "step 1 was dropped" in train({1}, limit=1)[2]


def test_a_stage_does_not_end_with_several_dropped_steps():
    saved, _, text = train({11, 12})
    assert saved == [4, 8]
    assert "the steps 11 to 12 were dropped" in text
    assert "a stage cannot end with dropped steps" in text
    assert train({12})[2] is None, "one may be a matter of its batch"
    assert train({12})[0] == [4, 8, 12]
    assert train({12}, limit=1)[2] is not None


def test_scores_that_end_a_stage_in_a_row_leave_no_checkpoint_of_it():
    assert train({5, 6}, ends_after=lambda step: step == 6)[::2] == ([4], None)


def test_counting_goes_on_from_a_checkpoint():
    _, records, text = train({9}, first=8, count=2)
    assert text is None
    assert [r["dropped_steps"] for r in records] == [3, 3, 3, 3]


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_loss_that_is_not_finite_sends_back_no_finite_gradient(value):
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum() + value
    plain = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert plain.isfinite().all(), "the control: by itself it would"
    assert torch.autograd.grad(without_gradient_unless_finite(loss), weight)[0].isnan().all()


def test_a_finite_loss_and_its_gradient_are_untouched():
    weight = torch.randn(5, requires_grad=True)
    loss = (weight**3).sum()
    expected = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    guarded = without_gradient_unless_finite(loss)
    assert torch.equal(guarded, loss)
    assert torch.equal(torch.autograd.grad(guarded, weight)[0], expected)


@pytest.mark.parametrize("cache", [True, False])
def test_the_step_guards_its_loss(cache, monkeypatch):
    of_stage = step_module.contrastive_loss
    added = {"value": 0.0}
    monkeypatch.setattr(
        step_module, "contrastive_loss", lambda *given: of_stage(*given) + added["value"]
    )
    model = ToyModel()
    stage = get_recipe("biencoder").stages[0]
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)

    def gradients():
        model.zero_grad()
        settings = StepSettings(40, cache, CPU)
        run_step(
            model, EngineModule(model), lambda loss, _: loss.backward(), batch, stage, settings
        )
        return [p.grad for p in model.parameters()]

    assert all(grad.isfinite().all() for grad in gradients())
    added["value"] = INF
    assert all(grad.isnan().any() for grad in gradients())


def test_means_leave_out_what_is_not_finite():
    assert mean_of_finite([1.0, NAN, 3.0, INF]) == 2.0
    assert math.isnan(mean_of_finite([NAN]))

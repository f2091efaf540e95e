"""Losses in the training step: InfoNCE to the bit as before, others against loops over texts."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from former_loss import former_contrastive_loss
from made_up_records import made_up_records
from plain_reference import reference_loss
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError, DataError
from rayembed.losses.cosent import cosent
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

PAIRS = 24


def stage(loss, *, in_batch=True, num_negatives=2, **optimizer):
    return parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {
                "global_pairs": PAIRS,
                "num_negatives": num_negatives,
                "in_batch_negatives": in_batch,
            },
            "loss": loss,
            "optimizer": {"learning_rate": 0.1, **optimizer},
            "steps": 3,
        },
    )


def batch_of(model, config, seed=0, **fields):
    records = made_up_records(PAIRS, seed=seed)
    made = make_step_batch(seed, records, config.batch.num_negatives, model.tokenizer)
    return dataclasses.replace(made, **fields)


def gradients(config, *, cache, budget=40, **fields):
    """Loss and gradients of one step, of the model and of the loss's parameters."""
    model = ToyModel()
    module = EngineModule(model, config.loss)
    settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
    batch = batch_of(model, config, **fields)
    report = run_step(model, module, lambda loss, last: loss.backward(), batch, config, settings)
    return report, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("dimensions", [[], [4, 2]])
@pytest.mark.parametrize("cache", [True, False])
def test_infonce_gives_the_weights_of_before_to_the_bit(in_batch, dimensions, cache, monkeypatch):
    config = stage({"temperature": 0.1, "dimensions": dimensions}, in_batch=in_batch)

    def after_three_steps():
        model = ToyModel(dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        module, settings = EngineModule(model), StepSettings(40, cache, torch.device("cpu"))
        torch.manual_seed(0)
        for step in range(3):
            optimizer.zero_grad()
            batch = batch_of(model, config, seed=step)
            run_step(model, module, lambda loss, _: loss.backward(), batch, config, settings)
            optimizer.step()
        return dict(model.named_parameters())

    found = after_three_steps()
    monkeypatch.setattr(step_module, "contrastive_loss", former_contrastive_loss)
    expected = after_three_steps()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    start = dict(ToyModel().named_parameters())
    assert all(not torch.equal(start[name], expected[name]) for name in expected)


@pytest.mark.parametrize("in_batch", [True, False])
def test_siglip_is_a_loop_over_texts_with_a_scale_and_a_bias(in_batch):
    config = stage({"kind": "siglip", "scale": 5.0, "bias": -2.0}, in_batch=in_batch)
    model = ToyModel()
    log_scale = torch.tensor(math.log(5.0), requires_grad=True)
    bias = torch.tensor(-2.0, requires_grad=True)

    def of_row(cosines):
        signs = torch.tensor([1.0, *[-1.0] * (len(cosines) - 1)])
        return -torch.log(torch.sigmoid(signs * (log_scale.exp() * cosines + bias))).sum()

    loss = reference_loss(
        model,
        made_up_records(PAIRS),
        temperature=1.0,
        num_negatives=2,
        in_batch=in_batch,
        of_row=of_row,
    )
    loss.backward()
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    expected |= {"loss.log_scale": log_scale.grad.view(1), "loss.bias": bias.grad.view(1)}
    for cache, budget in [(True, 13), (True, 40), (False, 40), (True, 10**6)]:
        report, found = gradients(config, cache=cache, budget=budget)
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        assert report.metrics["loss_bias"] == -2.0
        assert report.metrics["loss_log_scale"] == pytest.approx(math.log(5.0))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=3e-6, rtol=1e-4, msg=name)
    assert expected["loss.bias"].abs() > 1e-2


@pytest.mark.parametrize("cache", [True, False])
def test_cosent_compares_the_rows_with_each_other(cache):
    config = stage({"kind": "cosent", "dimensions": [4]}, in_batch=False, num_negatives=0)
    similarity = np.linspace(0, 1, PAIRS, dtype=np.float32).round(1)
    report, found = gradients(config, cache=cache, similarity=similarity)
    model = ToyModel()
    records = made_up_records(PAIRS)

    def vectors(texts, role):
        return model(model.tokenizer.collate(model.tokenizer(texts, role))).embeddings

    queries = vectors([r.query for r in records], "query")
    documents = vectors([r.positives[0] for r in records], "document")
    of_width = [
        cosent(
            torch.nn.functional.normalize(queries[:, :d], dim=1),
            torch.nn.functional.normalize(documents[:, :d], dim=1),
            torch.from_numpy(similarity),
            20.0,
        )
        for d in (8, 4)
    ]
    loss = sum(of_width)
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], p.grad, atol=2e-5, rtol=1e-4)


def test_a_row_without_a_grade_is_named_before_its_step_is_computed():
    config = stage("cosent", in_batch=False, num_negatives=0)
    similarity = np.full(PAIRS, 0.5, dtype=np.float32)
    similarity[[3, 7, 8]] = np.nan
    with pytest.raises(DataError, match=r"3 of this worker's 24 rows .* data sets classes, pairs"):
        gradients(config, cache=True, similarity=similarity)


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("kind", ["infonce", "siglip"])
def test_negatives_above_the_positive_by_a_teacher_are_as_if_removed(in_batch, kind):
    margin = {"kind": kind, "false_negatives": {"margin": 0.1}}
    batch = batch_of(ToyModel(), stage(margin))
    there = batch.negative_hash != 0
    positive = np.full(PAIRS, 0.5, dtype=np.float32)
    negative = np.where(there, 0.55, np.nan).astype(np.float32)  # above it, but not by the margin
    above = there & (np.arange(PAIRS)[:, None] % 3 == 0)
    negative[above] = 0.7
    negative[5] = np.nan  # without a score: it stays
    removed = np.where(above & (np.arange(PAIRS) != 5)[:, None], batch.negative_hash, 0)
    by_hand = np.concatenate([batch.not_negative_hash, removed], axis=1)
    scores = {"positive_score": positive, "negative_score": negative}
    _, found = gradients(stage(margin, in_batch=in_batch), cache=True, **scores)
    plain = stage({"kind": kind}, in_batch=in_batch)
    _, expected = gradients(plain, cache=True, not_negative_hash=by_hand)
    _, control = gradients(plain, cache=True, **scores)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any((found[name] - control[name]).abs().max() > 1e-3 for name in control)


def test_grades_and_scores_of_records_reach_the_loss():
    records = [
        dataclasses.replace(
            record,
            similarity=number / PAIRS,
            positive_score=0.5,
            negatives=tuple(dataclasses.replace(n, score=0.9) for n in record.negatives),
        )
        for number, record in enumerate(made_up_records(PAIRS))
    ]

    def loss_of(config, given):
        model = ToyModel()
        batch = make_step_batch(0, given, config.batch.num_negatives, model.tokenizer)
        module, settings = EngineModule(model), StepSettings(10**6, False, torch.device("cpu"))
        return run_step(
            model, module, lambda loss, _: loss.backward(), batch, config, settings
        ).loss

    graded = stage("cosent", in_batch=False, num_negatives=0)
    assert loss_of(graded, records) > 0
    equal = [dataclasses.replace(record, similarity=0.5) for record in records]
    assert loss_of(graded, equal) == 0.0
    masked = stage({"false_negatives": {}}, in_batch=False)
    assert loss_of(stage({}, in_batch=False), records) > 0
    assert loss_of(masked, records) == 0.0, "every negative is above its positive"


def test_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match="loss_learning_rate has no effect"):
        stage("infonce", loss_learning_rate=0.1)
    assert stage("siglip", loss_learning_rate=0.1).optimizer.loss_learning_rate == 0.1
    with pytest.raises(ConfigError, match="reads no negatives"):
        stage("cosent", in_batch=True, num_negatives=0)
    with pytest.raises(ConfigError, match="neither in-batch nor hard negatives"):
        stage("siglip", in_batch=False, num_negatives=0)

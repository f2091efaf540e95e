"""Losses under a teacher's stored scores: by hand, beside sentence-transformers, in the step."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from made_up_records import made_up_records
from plain_reference import reference_loss
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss
from torch.nn import functional
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.losses.listwise_kl import ListwiseKL, listwise_kl
from rayembed.losses.margin_mse import MarginMSE, margin_mse
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

PAIRS, NEGATIVES = 24, 2
KL = {"kind": "listwise_kl", "temperature": 0.5, "teacher_temperature": 0.7}
LOSSES = {
    "kl": KL | {"scaling": "none"},
    "kl, min-max": KL,
    "mse": {"kind": "margin_mse", "scale": 3.0},
}
NAN = math.nan


def units(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def test_margins_worked_out_by_hand():
    scores = torch.tensor([[0.9, 0.4, 0.5], [0.5, 0.2, 0.0], [0.7, 0.1, 0.3]])
    teacher = torch.tensor([[8.0, 7.0, 6.0], [1.0, 3.0, 0.0], [2.0, 2.0, 2.0]])
    known = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    found = margin_mse(scores, teacher, known)
    first = ((0.5 - 1.0) ** 2 + (0.4 - 2.0) ** 2) / 2
    torch.testing.assert_close(found, torch.tensor([first, (0.3 + 2.0) ** 2, 0.0]))


def test_divergences_worked_out_by_hand():
    logits = torch.tensor([[math.log(3), 0.0, 5.0], [1.0, 2.0, 3.0]])
    teacher = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    known = torch.tensor([[True, True, False], [False, False, False]])
    found = listwise_kl(logits, teacher, known)
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    torch.testing.assert_close(found, torch.tensor([expected, 0.0]))


def test_without_gaps_they_are_those_of_sentence_transformers():
    queries, documents = units(6, 8), units(6, 4, 8, seed=1)
    teacher = 5 * torch.rand(6, 4, generator=torch.Generator().manual_seed(2))
    columns = [queries, *documents.unbind(1)]
    cosines = torch.einsum("bd,bmd->bm", queries, documents)
    known = torch.ones(6, 4, dtype=torch.bool)
    theirs = MarginMSELoss(model=None).compute_loss_from_embeddings(columns, teacher)
    torch.testing.assert_close(margin_mse(cosines, teacher, known).mean(), theirs)
    peer = DistillKLDivLoss(model=None, student_temperature=0.2, teacher_temperature=2.0)
    theirs = peer.compute_loss_from_embeddings(columns, teacher) / 0.2**2
    torch.testing.assert_close(listwise_kl(cosines / 0.2, teacher / 2.0, known).mean(), theirs)


def test_scaled_scores_do_not_depend_on_the_teachers_range():
    cosines, teacher = units(4, 3), torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    known = torch.ones(4, 3, dtype=torch.bool)
    known[1, 2] = False
    loss = ListwiseKL()
    found = loss.of_scores(cosines, teacher, known)
    torch.testing.assert_close(loss.of_scores(cosines, 20 * teacher - 7, known), found)
    plain = ListwiseKL(scaling="none")
    assert (plain.of_scores(cosines, 20 * teacher, known) - found).abs().max() > 0.1
    equal = loss.of_scores(torch.zeros(4, 3), torch.ones(4, 3), known)
    torch.testing.assert_close(equal, torch.zeros(4))


@pytest.mark.parametrize("loss", [ListwiseKL(), MarginMSE()], ids=lambda loss: loss.kind)
def test_a_teacher_that_is_followed_leaves_no_gradient(loss):
    cosines = units(5, 4).requires_grad_()
    known = torch.ones(5, 4, dtype=torch.bool)
    if loss.kind == "listwise_kl":
        loss = ListwiseKL(scaling="none", temperature=0.05, teacher_temperature=0.05)
    loss.of_scores(cosines, cosines.detach(), known).sum().backward()
    assert cosines.grad.abs().max() < 1e-5


def stage(loss, *, in_batch=True, num_negatives=NEGATIVES):
    batch = {"global_pairs": PAIRS, "num_negatives": num_negatives, "in_batch_negatives": in_batch}
    settings = {"name": "s", "datasets": {"d": 1}, "batch": batch, "loss": loss}
    return parse(StageConfig, settings | {"optimizer": {"learning_rate": 0.1}, "steps": 3})


def scored_records(seed=0):
    """Records with made-up scores; some texts and a whole row have none."""
    draw = np.random.default_rng(seed)
    found = []
    for place, record in enumerate(made_up_records(PAIRS, seed=seed)):
        scores = draw.normal(size=len(record.negatives)).tolist()
        if place % 5 == 1:
            scores[:1] = [None] * len(scores[:1])
        positive = None if place % 7 == 3 else float(draw.normal()) + 1
        negatives = tuple(
            dataclasses.replace(n, score=s) for n, s in zip(record.negatives, scores, strict=True)
        )
        found.append(dataclasses.replace(record, positive_score=positive, negatives=negatives))
    return found


def distilled(records, model, of_row):
    """Mean over the records of the loss of their own scored texts, by a loop."""

    def vector(text, role):
        return model(model.tokenizer.collate(model.tokenizer([text], role)), None).embeddings[0]

    losses = []
    for record in records:
        scored = [(n.text, n.score) for n in record.negatives[:NEGATIVES] if n.score is not None]
        if record.positive_score is None or not scored:
            losses.append(torch.tensor(0.0))
            continue
        texts, scores = zip((record.positives[0], record.positive_score), *scored, strict=True)
        query = vector(record.query, "query")
        cosines = torch.stack([query @ vector(text, "document") for text in texts])
        losses.append(of_row(cosines, torch.tensor(scores)))
    return torch.stack(losses).mean()


def kl_of_row(cosines, scores):
    target = (scores / 0.7).softmax(0)
    return (target * (target.log() - (cosines / 0.5).log_softmax(0))).sum()


OF_ROW = {
    "kl": kl_of_row,
    "kl, min-max": lambda c, s: kl_of_row(c, (s - s.min()) / (s.max() - s.min())),
    "mse": lambda c, s: ((3 * (c[0] - c[1:]) - (s[0] - s[1:])) ** 2).mean(),
}


def gradients(config, records, *, cache, budget):
    model = ToyModel()
    batch = make_step_batch(0, records, NEGATIVES, model.tokenizer)
    settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
    report = run_step(
        model, EngineModule(model), lambda loss, _: loss.backward(), batch, config, settings
    )
    return report, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_is_a_loop_over_texts(kind, in_batch, weight):
    records = scored_records()
    assert any(n.score is None for r in records for n in r.negatives)
    model = ToyModel()
    loss = distilled(records, model, OF_ROW[kind])
    if weight:
        loss = loss + weight * reference_loss(
            model, records, temperature=0.1, num_negatives=NEGATIVES, in_batch=in_batch
        )
    loss.backward()
    config = stage(
        LOSSES[kind] | {"infonce_weight": weight, "infonce_temperature": 0.1}, in_batch=in_batch
    )
    expected = {name: p.grad for name, p in model.named_parameters()}
    for cache, budget in [(True, 13), (True, 40), (False, 40), (True, 10**6)]:
        report, found = gradients(config, records, cache=cache, budget=budget)
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=3e-6, rtol=1e-4, msg=name)
    other = scored_records()
    other[0] = dataclasses.replace(other[0], positive_score=-3.0)
    report, _ = gradients(config, other, cache=True, budget=40)
    assert abs(report.loss - loss.item()) > 1e-3, "the control, with another score"


def test_rows_that_no_teacher_scored_leave_finite_weights():
    records = made_up_records(PAIRS)
    for loss in LOSSES.values():
        config = stage(loss | {"infonce_weight": 0.0})
        report, found = gradients(config, records, cache=True, budget=40)
        assert report.loss == 0.0
        assert all(gradient.abs().max() == 0.0 for gradient in found.values())


def test_without_hard_negatives_it_is_refused():
    with pytest.raises(ConfigError, match=r"'margin_mse' reads a teacher's scores of"):
        stage("margin_mse", num_negatives=0)

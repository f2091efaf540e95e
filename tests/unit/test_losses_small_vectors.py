"""Losses on quantised vectors and the spread-out regulariser, against loops over texts."""

import numpy as np
import pytest
import torch
from made_up_records import made_up_records
from plain_reference import reference_loss
from torch.nn import functional
from toy_model import ToyModel

from rayembed.config.document import fingerprint
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.losses.contract import Candidates
from rayembed.losses.infonce import InfoNCE
from rayembed.losses.spread_out import product_sums, spread_out
from rayembed.losses.straight_through import straight_through
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive.batch_loss import Targets, pairwise_loss
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

PAIRS = 24


def stage(loss, *, in_batch=True, num_negatives=2):
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
            "optimizer": {"learning_rate": 0.1},
            "steps": 3,
        },
    )


def gradients(config, *, cache, budget=40):
    model = ToyModel()
    settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
    records = made_up_records(PAIRS)
    batch = make_step_batch(0, records, config.batch.num_negatives, model.tokenizer)
    module = EngineModule(model, config.loss)
    report = run_step(model, module, lambda loss, last: loss.backward(), batch, config, settings)
    return report.loss, {name: p.grad for name, p in model.named_parameters()}


class Seen(torch.nn.Module):
    """The toy model, whose vectors are changed."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change
        self.uses_context, self.tokenizer = False, model.tokenizer

    def forward(self, batch, context=None):
        found = self.model(batch, context)
        return found._replace(embeddings=self.change(found.embeddings))


def changed_to(width, precision):
    def change(vectors):
        x = functional.normalize(vectors[:, :width], dim=1)
        match precision:
            case "int8":  # 1 is the range of widths up to 64
                stored = torch.round(127 * x).detach() / 127
            case "binary":
                stored = torch.tensor(x.detach().numpy() > 0).float() * 2 - 1
                stored = stored / np.sqrt(width)
            case _:
                return x
        return x + (stored - x).detach()

    return change


def regulariser(model, width, in_batch):
    products = []

    def others(cosines):
        products.extend(cosines[1:])
        return cosines.sum() * 0

    reference_loss(
        Seen(model, changed_to(width, "float32")),
        made_up_records(PAIRS),
        temperature=1.0,
        num_negatives=2,
        in_batch=in_batch,
        of_row=others,
    )
    found = torch.stack(products)
    return found.mean() ** 2 + max(found.square().mean() - 1 / width, torch.zeros(()))


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("precisions", [[], ["int8", "binary"]])
def test_a_step_is_a_loop_over_texts_widths_and_number_types(
    in_batch, weight, precisions, monkeypatch
):
    loss = {"temperature": 0.2, "dimensions": [4], "precisions": precisions, "spread_out": weight}
    config = stage(loss, in_batch=in_batch)
    model = ToyModel()
    total = torch.zeros(())
    for width in (8, 4):
        for precision in ("float32", *precisions):
            total = total + reference_loss(
                Seen(model, changed_to(width, precision)),
                made_up_records(PAIRS),
                temperature=0.2,
                num_negatives=2,
                in_batch=in_batch,
            )
        total = total + weight * regulariser(model, width, in_batch)
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for cache, budget, block in [(True, 13, 2**23), (False, 40, 2**23), (True, 40, 7 * 72)]:
        monkeypatch.setattr(batch_loss, "_BLOCK", block if in_batch else block // 72)
        found_loss, found = gradients(config, cache=cache, budget=budget)
        assert found_loss == pytest.approx(total.item(), rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=3e-6, rtol=1e-4, msg=name)
    # The control: without one of the number types, or without the regulariser, it is another.
    if precisions or weight:
        without = stage(loss | {"precisions": precisions[:1], "spread_out": 0.0}, in_batch=in_batch)
        assert gradients(without, cache=True)[0] != pytest.approx(total.item(), rel=1e-3)


def test_gradients_pass_straight_through_but_not_at_the_ends_of_the_range():
    vectors = torch.zeros(1, 256)
    vectors[0, :4] = torch.tensor([0.5, 0.6, -0.3, -0.51])  # the range is 0.5
    vectors.requires_grad_()
    given = torch.arange(256.0)[None]
    (found,) = torch.autograd.grad((straight_through(vectors, "int8") * given).sum(), vectors)
    assert found[0, :5].tolist() == [0, 0, 2, 0, 4]
    given += 1
    (found,) = torch.autograd.grad((straight_through(vectors, "int8") * given).sum(), vectors)
    assert found[0, :4].tolist() == [1, 0, 3, 0]
    (found,) = torch.autograd.grad((straight_through(vectors, "binary") * given).sum(), vectors)
    assert torch.equal(found, given)


def test_regulariser_by_hand():
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    documents = torch.tensor([[0.6, 0.8], [0.8, -0.6], [1.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    candidates = Candidates(documents, torch.tensor([0, 1]), mask)
    sums = product_sums(queries, candidates)
    # Of the first query the second document, with 0.8; of the second 0.8 and 0.
    torch.testing.assert_close(sums, torch.tensor([[0.8, 0.64, 1.0], [0.8, 0.64, 2.0]]))
    mean, square = 1.6 / 3, 1.28 / 3  # below a half, the mean square of two dimensions
    assert spread_out(sums, 2).item() == pytest.approx(mean**2)
    assert spread_out(sums, 4).item() == pytest.approx(mean**2 + square - 0.25)
    alone = Candidates(documents[:1], torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool))
    assert spread_out(product_sums(queries, alone), 2).item() == 0.0


def test_settings_stand_in_fingerprints():
    plain = InfoNCE(dimensions=(4,))
    dumped = plain.model_dump(mode="json")
    assert fingerprint(dumped) != fingerprint(InfoNCE(precisions=("int8",)).model_dump(mode="json"))
    with pytest.raises(ConfigError, match="int8"):
        stage({"precisions": ["int4"]})
    with pytest.raises(ConfigError, match="twice"):
        stage({"precisions": ["int8", "int8"]})
    with pytest.raises(ConfigError, match="spread_out"):
        stage({"spread_out": -1.0})


def test_graded_pairs_are_compared_in_each_number_type():
    config = stage(
        {"kind": "cosent", "dimensions": [4], "precisions": ["binary", "int8"]},
        in_batch=False,
        num_negatives=0,
    )
    torch.manual_seed(0)
    given = torch.randn(2 * PAIRS, 8, requires_grad=True)
    vectors = functional.normalize(given, dim=1)
    similarity = torch.linspace(0, 1, PAIRS)
    none = torch.empty(0)
    pairs = torch.arange(PAIRS), torch.arange(PAIRS, 2 * PAIRS)
    targets = Targets(*pairs, none, none, similarity, none, none, none)
    loss = pairwise_loss(vectors, None, targets, config, {})
    expected = torch.zeros(())
    for width in (8, 4):
        for precision in ("float32", "binary", "int8"):
            x = changed_to(width, precision)(vectors)
            cosines = (x[:PAIRS] * x[PAIRS:]).sum(1) * 20.0
            above = similarity[:, None] > similarity[None]
            apart = (cosines[None] - cosines[:, None])[above]
            expected = expected + torch.cat([apart, torch.zeros(1)]).logsumexp(0)
    torch.testing.assert_close(loss, expected)
    (found,) = torch.autograd.grad(loss, given, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, given)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)

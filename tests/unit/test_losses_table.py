"""Every loss of the table: its settings, its blocks of rows, its parameters; and each by hand."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch.nn import functional

from rayembed.config.loss import LOSSES, Widths
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError
from rayembed.losses.contract import (
    Candidates,
    Contrastive,
    FalseNegatives,
    Pairwise,
    TeacherScores,
    TeacherVectors,
)
from rayembed.losses.cosent import cosent
from rayembed.losses.infonce import InfoNCE
from rayembed.losses.siglip import SigLIP, siglip
from rayembed.training.contrastive.engine_module import (
    LossParameters,
    named_values,
    parameter_shapes,
)

KINDS = tuple(
    kind for kind, cls in LOSSES.classes().items() if issubclass(cls, Contrastive | Pairwise)
)
"""Losses over embeddings; those of further packages may be over scores."""
DISTILLED = ("listwise_kl", "margin_mse")
TAUGHT = ("vector_distillation", "similarity_distillation")
TEACHERS = (5, 8)
"""Widths of two teachers' vectors."""


def stage(loss, **more):
    values = {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {
            "global_pairs": 4,
            "num_negatives": int(isinstance(loss, str) and loss in DISTILLED),
            "in_batch_negatives": loss != "cosent",
        },
        "loss": loss,
        "optimizer": {"learning_rate": 1e-3},
        "steps": 1,
    }
    if isinstance(loss, str) and loss in TAUGHT:
        values["teachers"] = [{"teacher": "a"}, {"teacher": "b"}]
    return parse(StageConfig, values | more)


def units(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def values_of(loss):
    initial = loss.initial_parameters(Widths(8, TEACHERS))
    assert tuple(initial) == loss.parameter_names
    assert all(value.dtype == torch.float32 for value in initial.values())
    return initial


def test_without_a_kind_the_loss_is_infonce_and_the_kind_alone_is_a_loss():
    assert stage({"temperature": 0.1}).loss == InfoNCE(temperature=0.1)
    assert stage({}).loss == InfoNCE()
    assert stage("siglip").loss == SigLIP()
    with pytest.raises(ConfigError, match=r"loss.kind = 'sigmoid': must be one of.*'siglip'"):
        stage("sigmoid")


def test_settings_of_infonce_are_written_whole():
    written = stage({"temperature": 0.1}).model_dump(mode="json")["loss"]
    assert written == {
        "kind": "infonce",
        "temperature": 0.1,
        "dimensions": [],
        "false_negatives": None,
        "precisions": [],
        "spread_out": 0.0,
    }
    masked = InfoNCE(false_negatives=FalseNegatives(margin=0.1))
    assert masked.model_dump(mode="json")["false_negatives"] == {"by": "mining", "margin": 0.1}


def test_settings_of_losses_are_read_without_torch():
    code = """
import json, sys
from rayembed.config.loss import LOSSES
from rayembed.config.stage import StageConfig
print(json.dumps([list(LOSSES.classes()), sorted({"torch", "ray"} & set(sys.modules))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [list(LOSSES.classes()), []]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [True, False])
def test_rows_of_a_loss_in_blocks_are_those_of_the_whole(kind, own):
    loss = stage(kind).loss
    if not loss.row_blocks:
        assert isinstance(loss, Pairwise)
        return
    assert isinstance(loss, Contrastive)
    queries, documents = units(6, 8), units(6, 5, 8, seed=1) if own else units(9, 8, seed=1)
    positive = torch.arange(6) % documents.shape[-2]
    mask = torch.rand(6, documents.shape[-2], generator=torch.Generator().manual_seed(2)) > 0.4
    mask[torch.arange(6), positive] = True
    places = torch.stack([positive, (positive + 1) % 5, (positive + 2) % 5], dim=1)
    if own:
        positive, places = torch.zeros_like(positive), torch.arange(5).expand(6, 5)
        mask[:, 0] = True
    scores = torch.rand(places.shape, generator=torch.Generator().manual_seed(3))
    scores[2, 1] = scores[4, 0] = math.nan

    seen = mask.clone()
    seen[:, 1] = True
    told = [(units(6, t, seed=t), units(*documents.shape[:-1], t, seed=t + 1)) for t in TEACHERS]

    def rows(chosen):
        vectors = documents[chosen] if own else documents
        teacher = TeacherScores(places[chosen], scores[chosen])
        taught = TeacherVectors(
            tuple(of_queries[chosen].half() for of_queries, _ in told),
            tuple((of_all[chosen] if own else of_all).half() for _, of_all in told),
            places[chosen],
            torch.ones(places[chosen].shape, dtype=torch.bool),
            seen[chosen],
        )
        given = Candidates(vectors, positive[chosen], mask[chosen], teacher, taught)
        return loss.of_rows(queries[chosen], given, values_of(loss))

    whole = rows(slice(0, 6))
    assert whole.shape == (6,)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(torch.cat([rows(slice(0, 2)), rows(slice(2, 6))]), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_masked_out_and_what_is_far_off_does_not_count(kind):
    """A better model has a smaller loss; what the mask leaves out changes nothing."""
    loss = stage(kind).loss
    aligned, crossed = torch.eye(4), torch.eye(4).roll(1, 0)
    if isinstance(loss, Pairwise):
        similarity = torch.tensor([1.0, 1.0, 0.0, 0.0])
        good = torch.cat([aligned[:2], crossed[2:]])
        found = [
            loss.of_pairs(aligned, documents, similarity, values_of(loss))
            for documents in (good, good.flip(0))
        ]
        assert found[0] < found[1]
        return
    mask = torch.ones(4, 4, dtype=torch.bool)
    place = torch.arange(4)
    teacher = TeacherScores(
        torch.stack([place, place.roll(1)], dim=1), torch.tensor([1.0, 0.0]).expand(4, 2)
    )

    # The teachers know the aligned documents, at the width of the model and at a smaller one.
    known = tuple(torch.eye(4, t).half() for t in (4, 4))
    taught = TeacherVectors(
        known, known, place.unsqueeze(1), torch.ones(4, 1, dtype=torch.bool), mask
    )

    def rows(documents):
        given = Candidates(documents, place, mask, teacher, taught)
        return loss.of_rows(aligned, given, loss.initial_parameters(Widths(4, (4, 4))))

    assert rows(aligned).mean() < rows(crossed).mean()
    mask[1, 3] = False  # the first row's own negative is the last document
    changed = torch.cat([aligned[:3], units(1, 4)])
    first = [rows(documents)[1] for documents in (aligned, changed)]
    assert first[0] == first[1]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_parameters_come_back_by_name(kind):
    loss = stage(kind).loss
    if not loss.parameter_names:
        return
    widths = Widths(8, TEACHERS)
    module = LossParameters(loss, widths).bfloat16()
    named = named_values(parameter_shapes(loss, widths), module())
    for name, value in values_of(loss).items():
        assert torch.equal(named[name], value), "also in bfloat16, which would round them"
    assert [name for name, _ in module.named_parameters()] == list(loss.parameter_names)


def test_siglip_of_two_queries_worked_out_by_hand():
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    candidates = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    scale, bias = 2.0, -1.0
    found = siglip(
        queries,
        candidates,
        torch.tensor([0, 2]),
        mask,
        torch.tensor(math.log(scale)),
        torch.tensor(bias),
    )

    def term(sign, cosine):
        return math.log(1 + math.exp(-sign * (scale * cosine + bias)))

    first = term(1, 1.0) + term(-1, 0.6)
    second = term(1, 1.0) + term(-1, 0.0) + term(-1, 0.8)
    torch.testing.assert_close(found, torch.tensor([first, second]))


def test_siglip_starts_as_in_the_paper():
    values = SigLIP().initial_parameters(Widths(8))
    assert values["log_scale"].item() == pytest.approx(math.log(10))
    assert values["bias"].item() == -10


def test_cosent_is_that_of_sentence_transformers():
    queries, documents = units(7, 5), units(7, 5, seed=1)
    similarity = torch.tensor([0.0, 0.2, 0.2, 0.5, 1.0, 0.7, 0.0])
    theirs = CoSENTLoss(SimpleNamespace(), scale=20.0)
    expected = theirs.compute_loss_from_embeddings([queries, documents], similarity)
    torch.testing.assert_close(cosent(queries, documents, similarity, 20.0), expected)
    equal = cosent(queries, documents, torch.ones(7), 20.0)
    assert equal.item() == 0.0, "pairs of one grade have no order"

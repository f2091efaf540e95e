"""Each loss over lists against its formula in plain Python, one list after the other."""

import math
import random
from typing import get_args

import pytest
import torch

from rayembed.config.loss import LOSSES
from rayembed_extras.reranking.losses.contract import ListLoss, ScoredLists
from rayembed_extras.reranking.losses.lambda_loss import LambdaLoss
from rayembed_extras.reranking.losses.list_mle import ListMLE
from rayembed_extras.reranking.losses.listwise_softmax import ListwiseSoftmax
from rayembed_extras.reranking.losses.pointwise_bce import PointwiseBCE
from rayembed_extras.reranking.losses.ranknet import RankNet
from rayembed_extras.reranking.losses.score_kl import ScoreKL
from rayembed_extras.reranking.losses.score_margin_mse import ScoreMarginMSE

SHORT = [5, 3, 2, 5, 4]
"""Documents of each list; the longest have five."""


def lists(seed=0):
    """Lists of random scores; of the last one only a negative has none of the teacher."""
    rng = random.Random(seed)
    scores = [[rng.gauss(0, 2) for _ in range(n)] for n in SHORT]
    teacher = [[rng.random() for _ in range(n)] for n in SHORT]
    teacher[4][2] = math.nan
    return scores, teacher


def padded(rows, filler):
    whole = [row + [filler] * (max(SHORT) - len(row)) for row in rows]
    return torch.tensor(whole, dtype=torch.float64)


def scored(scores, teacher):
    there = padded([[1] * n for n in SHORT], 0).bool()
    relevant = torch.zeros_like(there)
    relevant[:, 0] = True
    # What stands behind a list's end may be anything.
    return ScoredLists(padded(scores, 7.0), relevant, there, padded(teacher, math.nan))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def bce(scores, _, weight):
    terms = [-weight * math.log(sigmoid(scores[0]))]
    terms += [-math.log(1 - sigmoid(s)) for s in scores[1:]]
    return sum(terms) / len(terms)


def softmax(scores, _, temperature):
    values = [math.exp(s / temperature) for s in scores]
    return -math.log(values[0] / sum(values))


def known(scores, teacher):
    return zip(
        *[(s, t) for s, t in zip(scores, teacher, strict=True) if not math.isnan(t)], strict=True
    )


def ranknet_labels(scores, _):
    return sum(math.log(1 + math.exp(s - scores[0])) for s in scores[1:]) / (len(scores) - 1)


def ranknet_teacher(scores, teacher):
    scores, teacher = known(scores, teacher)
    terms = [
        math.log(1 + math.exp(b - a))
        for a, of_a in zip(scores, teacher, strict=True)
        for b, of_b in zip(scores, teacher, strict=True)
        if of_a > of_b
    ]
    return sum(terms) / len(terms)


def mle(scores, teacher):
    scores, teacher = known(scores, teacher)
    order = sorted(range(len(scores)), key=lambda i: -teacher[i])
    terms = []
    for rank in range(len(order)):
        rest = [math.exp(scores[i]) for i in order[rank:]]
        terms.append(-math.log(math.exp(scores[order[rank]]) / sum(rest)))
    return sum(terms) / len(terms)


def ndcg(order):
    """NDCG of an order of documents, of which document 0 alone is relevant."""
    return sum(1 / math.log2(2 + rank) for rank, document in enumerate(order) if document == 0)


def lambdas(scores, _):
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    total = 0.0
    for other in range(1, len(scores)):
        swapped = [{0: other, other: 0}.get(document, document) for document in order]
        change = abs(ndcg(order) - ndcg(swapped))
        total += change * math.log(1 + math.exp(scores[other] - scores[0]))
    return total


def margins(scores, teacher):
    scores, teacher = known(scores, teacher)
    terms = [
        (sigmoid(scores[0]) - sigmoid(s) - (teacher[0] - t)) ** 2
        for s, t in zip(scores[1:], teacher[1:], strict=True)
    ]
    return sum(terms) / len(terms)


def divergence(scores, teacher, temperature, of_teacher):
    scores, teacher = known(scores, teacher)
    p = [math.exp(t / of_teacher) for t in teacher]
    q = [math.exp(s / temperature) for s in scores]
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


CASES = {
    "pointwise_bce": (PointwiseBCE(positive_weight=3.0), bce, (3.0,)),
    "listwise_softmax": (ListwiseSoftmax(temperature=0.5), softmax, (0.5,)),
    "ranknet": (RankNet(), ranknet_labels, ()),
    "ranknet of a teacher": (RankNet(order="teacher"), ranknet_teacher, ()),
    "list_mle": (ListMLE(), mle, ()),
    "lambda_loss": (LambdaLoss(), lambdas, ()),
    "score_margin_mse": (ScoreMarginMSE(), margins, ()),
    "score_kl": (ScoreKL(temperature=2.0, teacher_temperature=0.2), divergence, (2.0, 0.2)),
}


def test_no_loss_over_lists_is_left_out():
    kinds = {kind for kind, cls in LOSSES.classes().items() if issubclass(cls, ListLoss)}
    assert kinds == {
        get_args(type(c[0]).model_fields["kind"].annotation)[0] for c in CASES.values()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula(name):
    loss, formula, settings = CASES[name]
    scores, teacher = lists()
    found = loss.of_lists(scored(scores, teacher))
    expected = [formula(s, t, *settings) for s, t in zip(scores, teacher, strict=True)]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_list_and_unknown_scores_have_no_gradient(name):
    scores, teacher = lists(seed=1)
    teacher[1] = [math.nan] * 3  # a list without a teacher's scores
    given = scored(scores, teacher)
    values = given.scores_LM.requires_grad_()
    CASES[name][0].of_lists(given._replace(scores_LM=values)).sum().backward()
    assert values.grad.isfinite().all()
    assert (values.grad[~given.there_LM] == 0).all()
    learns = (values.grad != 0).any(dim=1).tolist()
    assert learns == [True, "teacher_scores" not in CASES[name][0].needs, True, True, True]


@pytest.mark.parametrize("name", CASES)
def test_a_step_downhill_ranks_the_better_document_higher(name):
    """The control that signs are right: the teacher, too, has the positive on top."""
    scores = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    teacher = torch.tensor([[0.9, 0.2, 0.1]], dtype=torch.float64)
    given = ScoredLists(scores, mask, torch.ones_like(mask), teacher)
    CASES[name][0].of_lists(given).sum().backward()
    assert scores.grad[0, 0] < 0 < scores.grad[0, 1]

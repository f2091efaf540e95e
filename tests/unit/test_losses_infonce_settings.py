"""Settings of InfoNCE against loops over texts, sentence-transformers, and values by hand."""

import dataclasses
import math

import pytest
import torch
from made_up_records import made_up_records
from plain_infonce import plain_infonce
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.nn import functional
from toy_model import ToyTokenizer

from rayembed.config.loss import Widths
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.records import Negative, Record
from rayembed.errors import ConfigError
from rayembed.losses.infonce import InfoNCE, focal
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive.batch_loss import Targets, contrastive_loss, rows_of

CPU = torch.device("cpu")
PAIRS, WIDTH = 24, 16
DIRECTIONS = ("document_to_query", "query_to_query", "document_to_document")
OWN = {"by": "own", "margin": 0.1}
SETTINGS = {
    **{direction: {"directions": [direction]} for direction in DIRECTIONS},
    "all directions": {"directions": [*DIRECTIONS]},
    "symmetric": {"directions": ["document_to_query"], "partition": "per_direction"},
    "hard": {"hardness": {"strength": 5.0}},
    "all hard": {"hardness": {"strength": 9.0, "of": "all"}},
    "focal": {"focal": 0.5},
    "own": {"false_negatives": OWN},
    "own in all directions": {"directions": [*DIRECTIONS], "false_negatives": OWN},
    "together": {
        "directions": [*DIRECTIONS],
        "hardness": {},
        "focal": 2.0,
        "false_negatives": {"by": "own", "margin": -0.05},
    },
}


def stage_of(loss, *, pairs=PAIRS, in_batch=True, num_negatives=2, num_positives=1, **optimizer):
    return parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {
                "global_pairs": pairs,
                "num_negatives": num_negatives,
                "num_positives": num_positives,
                "in_batch_negatives": in_batch,
            },
            "loss": loss,
            "optimizer": {"learning_rate": 0.1, **optimizer},
            "steps": 1,
        },
    )


class Vectors(dict):
    """A unit vector of each text and role, and the matrix from which they are made."""

    def __init__(self, records, seed=0):
        super().__init__()
        keys = [(r.query, "query") for r in records]
        keys += [(t, "document") for r in records for t in r.positives]
        keys += [(n.text, "document") for r in records for n in r.negatives]
        torch.manual_seed(seed)
        keys = list(dict.fromkeys(keys))
        self.raw = torch.randn(len(keys), WIDTH, requires_grad=True)
        self.update(zip(keys, functional.normalize(self.raw, dim=1), strict=True))


def ours(records, vectors, stage, parameters=None):
    """The step's loss of the records, with the vectors in place of a model's."""
    of_batch = stage.batch
    batch = make_step_batch(
        0,
        records,
        of_batch.num_negatives,
        ToyTokenizer(),
        num_positives=of_batch.num_positives,
    )
    found = {}
    for i, r in enumerate(records):
        found[int(batch.query[i])] = vectors[r.query, "query"]
        found[int(batch.positive[i])] = vectors[r.positives[0], "document"]
        for place, negative in zip(batch.negatives[i], r.negatives, strict=False):
            found[int(place)] = vectors[negative.text, "document"]
        others = [text for text in dict.fromkeys(r.positives) if text != r.positives[0]]
        for place, text in zip(batch.further_positives[i], others, strict=False):
            found[int(place)] = vectors[text, "document"]
    embeddings = torch.stack([found[place] for place in range(len(batch.tokens))])
    rows, targets = rows_of(batch, CPU), Targets.of(batch, CPU)
    return contrastive_loss(embeddings, rows, targets, stage, parameters or {})


def with_gradient(loss, vectors):
    (gradient,) = torch.autograd.grad(loss, vectors.raw, retain_graph=True)
    return loss.detach(), gradient


def assert_same(found, expected, vectors):
    for one, other in zip(
        with_gradient(found, vectors), with_gradient(expected, vectors), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_each_setting_is_a_loop_over_texts(name, seed):
    records = made_up_records(PAIRS, seed=seed)
    stage, vectors = stage_of({"temperature": 0.3, **SETTINGS[name]}), Vectors(records, seed)
    found, expected = ours(records, vectors, stage), plain_infonce(records, vectors, stage.loss)
    assert_same(found, expected, vectors)
    plain = ours(records, vectors, stage_of({"temperature": 0.3}))
    assert abs((plain - found).item()) > 1e-3, "the setting changes something"


@pytest.mark.parametrize("name", ["hard", "all hard", "focal", "own"])
def test_rows_that_are_kept_apart_take_the_settings_too(name):
    records = made_up_records(PAIRS)
    stage = stage_of({"temperature": 0.3, **SETTINGS[name]}, in_batch=False)
    vectors = Vectors(records)
    expected = plain_infonce(records, vectors, stage.loss, in_batch=False)
    assert_same(ours(records, vectors, stage), expected, vectors)


@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_and_widths_change_nothing(name, monkeypatch):
    records = made_up_records(PAIRS)
    vectors = Vectors(records)
    stage = stage_of({"temperature": 0.3, "dimensions": [8], **SETTINGS[name]})
    whole = with_gradient(ours(records, vectors, stage), vectors)
    monkeypatch.setattr(batch_loss, "_BLOCK", 5 * 3 * PAIRS)
    for one, other in zip(
        with_gradient(ours(records, vectors, stage), vectors), whole, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


SEVERAL = {
    "plain": {},
    "weighted": {"hardness": {}, "focal": 0.5, "false_negatives": OWN},
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("number", [2, 3])
def test_all_positives_of_a_row_are_each_compared_with_its_negatives(name, in_batch, number):
    records = made_up_records(PAIRS)
    records[4] = dataclasses.replace(records[4], positives=("one", "two", "one", "three", "four"))
    vectors = Vectors(records)
    batch = {"in_batch": in_batch, "num_positives": number}
    stage = stage_of({"temperature": 0.3, **SEVERAL[name]}, **batch)
    expected = plain_infonce(records, vectors, stage.loss, **batch)
    assert_same(ours(records, vectors, stage), expected, vectors)
    first = plain_infonce(records, vectors, stage.loss, in_batch=in_batch)
    assert abs((first - expected).item()) > 1e-3


def test_several_positives_are_the_mean_over_rows_of_one():
    row = Record(id="0", query="a", positives=("x", "y"), negatives=(Negative("z"),), dataset="d")
    vectors, batch = Vectors([row]), {"pairs": 1, "in_batch": False, "num_negatives": 1}
    found = ours([row], vectors, stage_of({}, num_positives=5, **batch))
    turned = dataclasses.replace(row, positives=("y", "x"))
    one_each = [ours([one], vectors, stage_of({}, **batch)) for one in (row, turned)]
    assert_same(found, sum(one_each) / 2, vectors)


def plain_records(count=8):
    """No text twice, and two negatives each: what other trainers assume."""
    return [
        Record(
            id=str(i),
            query=f"q{i}",
            positives=(f"p{i}",),
            negatives=(Negative(f"n{i}"), Negative(f"m{i}")),
            dataset="d",
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        ({"directions": ("query_to_doc", "query_to_query")}, "query_to_query"),
        ({"directions": ("query_to_doc", "doc_to_doc")}, "document_to_document"),
        (
            {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
            "symmetric",
        ),
        ({"hardness_mode": "hard_negatives", "hardness_strength": 5.0}, "hard"),
        ({"hardness_mode": "all_negatives", "hardness_strength": 9.0}, "all hard"),
    ],
)
def test_settings_are_those_of_sentence_transformers(theirs, name):
    records = plain_records()
    vectors, stage = Vectors(records), stage_of({"temperature": 0.1, **SETTINGS[name]}, pairs=8)
    columns = [
        torch.stack([vectors[r.query, "query"] for r in records]),
        *(
            torch.stack([vectors[texts[i], "document"] for texts in map(_documents, records)])
            for i in range(3)
        ),
    ]
    peer = MultipleNegativesRankingLoss(None, scale=10.0, **theirs)
    expected = peer.compute_loss_from_embeddings(columns, torch.zeros(8))
    assert_same(ours(records, vectors, stage), expected, vectors)


def _documents(record):
    return [record.positives[0], *(n.text for n in record.negatives)]


def test_rows_that_share_an_answer_are_not_pushed_apart():
    shared = Record(id="0", query="a", positives=("x", "y"), dataset="d")
    second = Record(id="1", query="b", positives=("y",), dataset="d")
    third = Record(id="2", query="c", positives=("z",), dataset="d")
    vectors = Vectors([shared, second, third])
    all_of = {"temperature": 1.0, "directions": [*DIRECTIONS]}
    stage = stage_of(all_of, pairs=3, num_negatives=0)

    def related(of_row):
        """Which texts move if only that row's loss counts."""
        rows = [shared, second, third]
        batch = make_step_batch(0, rows, 0, ToyTokenizer())
        texts = [(r.query, "query") for r in rows] + [(r.positives[0], "document") for r in rows]
        embeddings = torch.stack([vectors[key] for key in texts])
        made = batch_loss._Compared.of(
            embeddings, rows_of(batch, CPU), Targets.of(batch, CPU), stage.loss, True
        )
        return [one.mask_BN[of_row].tolist() for one in made.candidates(slice(0, 3)).further]

    # Row 1's positive is a known positive of row 0, which trains another one: only masks of all
    # workers' known texts show it.
    assert related(1) == [[False, False, True]] * 3
    assert related(0) == [[False, False, True]] * 3
    assert related(2) == [[True, True, False]] * 3


def test_focal_of_three_rows_by_hand():
    chances = torch.tensor([0.9, 0.5, 0.1], requires_grad=True)
    expected = (1 - chances) ** 2.0 * -torch.log(chances)
    torch.testing.assert_close(focal(-torch.log(chances), 2.0), expected)
    solved = torch.zeros(1, requires_grad=True)
    focal(solved, 0.5).sum().backward()
    assert solved.grad.isfinite().all()


def test_a_learnt_temperature_has_the_gradient_of_the_formula():
    records = made_up_records(PAIRS)
    vectors = Vectors(records)
    stage = stage_of(
        {"temperature": 0.3, "learnt_temperature": True, "directions": [*DIRECTIONS]},
        loss_learning_rate=0.1,
    )
    values = stage.loss.initial_parameters(Widths(WIDTH))
    assert tuple(values) == stage.loss.parameter_names == ("log_temperature",)
    (value,) = values.values()
    value.requires_grad_()
    found = ours(records, vectors, stage, values)
    expected = plain_infonce(records, vectors, stage.loss, temperature=value.exp())
    for loss, other in ((found, expected),):
        assert_same(loss, other, vectors)
        torch.testing.assert_close(
            torch.autograd.grad(loss, value, retain_graph=True),
            torch.autograd.grad(other, value, retain_graph=True),
            rtol=1e-4,
            atol=1e-6,
        )
    for sign, expected in ((1, 0), (-1, -0.01)):  # down from below the limit it goes no further
        low = torch.tensor(math.log(0.001), requires_grad=True)
        temperature = stage.loss.temperature_of({"log_temperature": low})
        assert temperature.item() == pytest.approx(0.01)
        (sign * temperature).backward()
        assert low.grad.item() == pytest.approx(expected)


def test_settings_that_are_off_stand_in_no_file():
    written = InfoNCE().model_dump(mode="json")
    assert set(written) == {
        *("kind", "temperature", "dimensions", "precisions", "false_negatives", "spread_out")
    }
    changed = InfoNCE(focal=0.5).model_dump(mode="json")
    assert set(changed) - set(written) == {"focal"}


@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        ({"directions": ["query_to_query"]}, {"in_batch": False}, "in_batch_negatives=false keeps"),
        ({"directions": ["sideways"]}, {}, "directions"),
        ({"hardness": {}}, {"num_negatives": 0}, "batch.num_negatives is 0"),
        (
            {"directions": ["query_to_query"], "partition": "per_direction"},
            {},
            r"directions=\[document_to_query\]",
        ),
        ({"partition": "per_direction"}, {}, "partition=joint"),
        ({"learnt_temperature": True, "temperature": 0.005}, {}, "begin with that or more"),
        (
            {"directions": ["query_to_query"]},
            {"num_positives": 2},
            r"\['query_to_query'\] compares the one positive",
        ),
        ({"false_negatives": {"by": "own"}}, {}, "needs loss.false_negatives.margin"),
        ({"kind": "siglip"}, {"num_positives": 2}, "'siglip' reads one positive of a row"),
        ({"focal": -1}, {}, "greater than or equal to 0"),
        ({"kind": "margin_mse", "infonce_weight": 0, "focal": 1}, {}, "focal: no effect"),
        ({"kind": "siglip", "focal": 1}, {}, "no setting 'loss.focal'"),
        (
            {"kind": "vector_distillation", "teacher_documents": 0.3, "hardness": {}},
            {},
            "teacher_documents=0",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(loss, batch, message):
    with pytest.raises(ConfigError, match=message):
        stage_of(loss, **batch)
    assert stage_of({"directions": ["query_to_query"]}).loss.directions == ("query_to_query",)


def test_a_learning_rate_of_the_loss_needs_a_learnt_temperature():
    with pytest.raises(ConfigError, match="loss_learning_rate has no effect"):
        stage_of({}, loss_learning_rate=0.1)
    assert stage_of({"learnt_temperature": True}, loss_learning_rate=0.1)

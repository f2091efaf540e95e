"""Losses and masks by stored vectors of teachers: by hand, beside loops over texts, in the step."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from made_up_records import made_up_records
from made_up_teachers import TEACHERS, MadeUpTeacher, false_negatives, taught_loss
from plain_reference import reference_loss
from toy_model import ToyModel

from rayembed.config.loss import Widths
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError, DataError
from rayembed.losses.contract import Candidates, TeacherVectors, exact_cosines
from rayembed.losses.similarity_distillation import SimilarityDistillation
from rayembed.losses.vector_distillation import VectorDistillation
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive.batch_loss import Targets, contrastive_loss, rows_of
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.memory.graph_room import LiveBytes
from rayembed.training.objective import StepSettings

PAIRS, NEGATIVES = 24, 2
WIDTHS = tuple(teacher.width for teacher in TEACHERS)
LOSSES = {
    "cosine": {"kind": "vector_distillation"},
    "mse": {"kind": "vector_distillation", "form": "mse"},
    "kl": {"kind": "similarity_distillation", "temperature": 0.3, "teacher_temperature": 0.5},
    "relations": {"kind": "similarity_distillation", "form": "mse"},
}
BY_TEACHERS = {"by": "teachers", "margin": 0.1}


def stage(loss, *, in_batch=True, teachers=("five", "eight")):
    batch = {"global_pairs": PAIRS, "num_negatives": NEGATIVES, "in_batch_negatives": in_batch}
    settings = {"name": "s", "datasets": {"d": 1}, "batch": batch, "loss": loss}
    settings["teachers"] = [{"teacher": name} for name in teachers]
    return parse(StageConfig, settings | {"optimizer": {"learning_rate": 0.1}, "steps": 3})


def one_row(queries, documents, teacher_query, teacher_documents, places, own, seen, loss, **given):
    """Loss of one query without InfoNCE."""
    of = [torch.tensor(v, dtype=torch.float16) for v in (teacher_query, teacher_documents)]
    taught = TeacherVectors(
        (of[0].unsqueeze(0),),
        (of[1],),
        torch.tensor([places]),
        torch.tensor([own]),
        torch.tensor([seen]),
    )
    documents = torch.tensor(documents)
    mask = torch.ones(1, len(documents), dtype=torch.bool)
    candidates = Candidates(documents, torch.tensor([places[0]]), mask, None, taught)
    return loss.of_rows(torch.tensor([queries]), candidates, given).item()


def test_distances_worked_out_by_hand():
    texts = ([1.0, 0.0], [[0.0, 1.0], [0.6, 0.8], [1.0, 0.0]])
    taught = ([0.6, 0.0, 0.8], [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    row = (*texts, *taught, [0, 1, 2], [True, True, False], [True] * 3)
    matrix = torch.eye(3, 2)
    alone = {"infonce_weight": 0.0}
    found = one_row(*row, VectorDistillation(**alone), projection=matrix)
    # The query's cosine is 0.6, the positive's 1, the negative's 0.6; the third one is missing.
    assert found == pytest.approx((0.4 + (0.0 + 0.4) / 2) / 2, abs=1e-3)
    found = one_row(*row, VectorDistillation(form="mse", **alone), projection=matrix)
    assert found == pytest.approx(((0.16 + 0.64) / 3 + (0 + (0.16 + 0.64) / 3) / 2) / 2, abs=1e-3)
    doubled = one_row(*row, VectorDistillation(form="mse", **alone), projection=2 * matrix)
    assert doubled == pytest.approx(
        ((1.4**2 + 0.64) / 3 + (1 / 3 + (0.2**2 + 1.6**2) / 3) / 2) / 2, abs=2e-3
    )


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_infonce_over_the_teachers_documents_by_hand(share):
    documents, old = [[0.0, 1.0], [0.6, 0.8], [1.0, 0.0]], [[0.8, 0.6], [1.0, 0.0], [0.0, 1.0]]
    row = ([0.6, 0.8], documents, [1.0, 0.0], old, [0], [True], [True] * 3)
    given = {"projection": False, "infonce_weight": 0.5, "infonce_temperature": 0.1}
    found = one_row(*row, VectorDistillation(teacher_documents=share, **given))

    def infonce(positive, *others):
        return -positive / 0.1 + math.log(sum(math.exp(s / 0.1) for s in (positive, *others)))

    # The query's cosines with the model's documents, and with the teacher's.
    own, across = infonce(0.8, 1.0, 0.6), infonce(0.96, 0.6, 0.8)
    distance = (0.4 + 0.4) / 2
    expected = distance + 0.5 * ((1 - share) * own + share * across)
    assert found == pytest.approx(expected, abs=2e-3)
    without = one_row(*row, VectorDistillation(**given))
    assert without == pytest.approx(distance + 0.5 * own, abs=2e-3)
    matrix = torch.tensor([[0.0, 2.0], [2.0, 0.0]])  # the vector is turned to (0.8, 0.6)
    of = VectorDistillation(teacher_documents=1.0, infonce_weight=1.0, infonce_temperature=0.1)
    alone = VectorDistillation(infonce_weight=0.0)
    turned = one_row(*row, of, projection=matrix) - one_row(*row, alone, projection=matrix)
    assert turned == pytest.approx(infonce(1.0, 0.8, 0.6), abs=2e-3)


def test_relations_worked_out_by_hand():
    texts = ([1.0, 0.0], [[0.0, 1.0], [0.6, 0.8], [1.0, 0.0]])
    taught = ([1.0, 0.0], [[0.5, 0.0], [0.25, 0.0], [1.0, 0.0]])  # cosines 0.5, 0.25 and 1
    row = (*texts, *taught, [0], [True], [True, True, False])
    alone = {"infonce_weight": 0.0}
    found = one_row(*row, SimilarityDistillation(form="mse", **alone))
    assert found == pytest.approx((0.5**2 + 0.35**2) / 2)
    loss = SimilarityDistillation(temperature=0.5, teacher_temperature=0.25, **alone)
    p = math.e / (1 + math.e)
    q = 1 / (1 + math.exp(1.2))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert one_row(*row, loss) == pytest.approx(expected, rel=1e-5)


def test_cosines_of_stored_vectors_are_exact_in_any_order():
    queries = torch.from_numpy(MadeUpTeacher(384)([("query", n) for n in range(1, 40)]))
    documents = torch.from_numpy(MadeUpTeacher(384)([("document", n) for n in range(1, 90)]))
    found = exact_cosines(queries, documents)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, exact_cosines(queries[:, order], documents[:, order]))
    assert torch.equal(found[7:9, 3:], exact_cosines(queries[7:9], documents[3:]))
    own = documents[:39].unsqueeze(1)
    assert torch.equal(found[:, :39].diagonal(), exact_cosines(queries, own).squeeze(1))
    plain = queries.float() @ documents.float().T
    shuffled = queries[:, order].float() @ documents[:, order].float().T
    assert not torch.equal(plain, shuffled), "the control in float32"


def run(config, *, cache=True, budget=40, change=None, records=None, teachers=TEACHERS):
    """Report of a step, gradients of the model and of the loss's parameters."""
    model = ToyModel()
    records = made_up_records(PAIRS) if records is None else records
    batch = make_step_batch(0, records, NEGATIVES, model.tokenizer, teachers)
    batch = batch if change is None else change(batch)
    module = EngineModule(model, config.loss, tuple(t.width for t in teachers))
    settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
    report = run_step(model, module, lambda loss, _: loss.backward(), batch, config, settings)
    return report, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_is_a_loop_over_texts(kind, in_batch, weight, monkeypatch):
    records, model = made_up_records(PAIRS), ToyModel()
    loss = LOSSES[kind] | {"infonce_weight": weight, "infonce_temperature": 0.1}
    config = stage(loss, in_batch=in_batch)
    initial = config.loss.initial_parameters(Widths(8, WIDTHS))
    projection = {n: value.requires_grad_() for n, value in initial.items()}
    assert list(projection) == (["projection"] if "vector" in loss["kind"] else [])
    wanted = taught_loss(model, records, config.loss, NEGATIVES, in_batch=in_batch, **projection)
    if weight:
        wanted = wanted + weight * reference_loss(
            model, records, temperature=0.1, num_negatives=NEGATIVES, in_batch=in_batch
        )
    wanted.backward()
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    for name, value in projection.items():
        expected[f"loss.{name}"] = value.grad.flatten()
    ways = [(True, 13, 0), (True, 40, 0), (False, 40, 0), (True, 10**6, 0), (True, 40, 7)]
    for cache, budget, rows in ways:
        block = rows * (PAIRS * (1 + NEGATIVES) if in_batch else 1) or 1 << 23
        monkeypatch.setattr(batch_loss, "_BLOCK", block)
        report, found = run(config, cache=cache, budget=budget)
        assert report.loss == pytest.approx(wanted.item(), rel=1e-5)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=5e-6, rtol=1e-4, msg=name)
    others = (MadeUpTeacher(5, seed=9), TEACHERS[1])
    report, _ = run(config, teachers=others)
    assert abs(report.loss - wanted.item()) > 1e-3, "the control, with another teacher"


@pytest.mark.parametrize("in_batch", [True, False])
def test_infonce_over_the_teachers_documents_is_the_same_in_blocks(in_batch, monkeypatch):
    across = {"teacher_documents": 0.3, "infonce_temperature": 0.1}
    config = stage(LOSSES["cosine"] | across, in_batch=in_batch)
    whole, expected = run(config, cache=False, budget=10**6)
    monkeypatch.setattr(batch_loss, "_BLOCK", 7 * (PAIRS * (1 + NEGATIVES) if in_batch else 1))
    report, found = run(config)
    assert report.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=5e-6, rtol=1e-4, msg=name)
    without, _ = run(stage(LOSSES["cosine"] | across | {"teacher_documents": 0}, in_batch=in_batch))
    assert abs(without.loss - whole.loss) > 1e-3, "the control without them"


def test_vectors_cut_to_a_width_meet_the_leading_columns():
    config = stage(LOSSES["cosine"] | {"dimensions": [4], "infonce_weight": 0.0})
    model, records = ToyModel(), made_up_records(PAIRS)
    matrix = torch.eye(13, 8)
    matrix[:5], matrix[5:] = torch.eye(5, 8), torch.eye(8)
    full = taught_loss(model, records, config.loss, NEGATIVES, projection=matrix)
    matrix[:, 4:] = 0.0
    cut = taught_loss(model, records, config.loss, NEGATIVES, projection=matrix)
    assert run(config)[0].loss == pytest.approx((full + cut).item(), rel=1e-5)


def test_teachers_of_the_models_width_need_no_projection():
    loss = VectorDistillation(infonce_weight=0.0, dimensions=(4,))
    assert loss.initial_parameters(Widths(8, (8, 8))) == {}
    always = VectorDistillation(projection=True).initial_parameters(Widths(8, (8,)))
    assert torch.equal(always["projection"], torch.eye(8))
    with pytest.raises(
        ConfigError, match=r"vectors have 8 dimensions and those .* teachers have 8, 5; set"
    ):
        VectorDistillation(projection=False).initial_parameters(Widths(8, (8, 5)))
    same = (TEACHERS[1],)
    config = stage(loss.model_dump(mode="json"), teachers=["eight"])
    report, found = run(config, teachers=same)
    assert not any(name.startswith("loss.") for name in found)

    def far(vectors):
        picked = torch.nn.functional.normalize(vectors[:4], dim=0)
        return picked

    teacher, model, total = TEACHERS[1], ToyModel(), []
    for record in made_up_records(PAIRS):
        for of in (lambda v: v, far):

            def distance(text, role, of=of):
                tokens = model.tokenizer.collate(model.tokenizer([text], role))
                return 1 - of(model(tokens).embeddings[0]) @ of(teacher.of_text(text, role))

            own = [record.positives[0], *(n.text for n in record.negatives[:NEGATIVES])]
            of_own = torch.stack([distance(text, "document") for text in own]).mean()
            total.append((distance(record.query, "query") + of_own) / 2)
    expected = 2 * torch.stack(total).mean().item()
    assert report.loss == pytest.approx(expected, abs=1e-3), "float16 vectors are not quite unit"


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("kind", ["infonce", "siglip", "similarity_distillation"])
@pytest.mark.parametrize("margin", [0.0, 0.2, -0.1])
def test_documents_above_the_positive_are_as_if_removed(kind, in_batch, margin, monkeypatch):
    masked = {"kind": kind, "false_negatives": {"by": "teachers", "margin": margin}}
    records = made_up_records(PAIRS)
    told = [false_negatives(records, r, NEGATIVES, margin) for r in records]
    assert 20 < sum(map(len, told)) < 24 * 60
    by_hand = np.zeros((PAIRS, max(map(len, told))), dtype=np.int64)
    for row, hashes in enumerate(told):
        by_hand[row, : len(hashes)] = hashes

    def without(batch):
        kept_out = np.concatenate([batch.not_negative_hash, by_hand], axis=1)
        return dataclasses.replace(batch, not_negative_hash=kept_out)

    teachers = () if kind in ("infonce", "siglip") else ("five", "eight")
    plain = stage({"kind": kind}, in_batch=in_batch, teachers=teachers)
    _, expected = run(plain, change=without)
    for rows in (0, 5):
        block = rows * (PAIRS * (1 + NEGATIVES) if in_batch else 1) or 1 << 23
        monkeypatch.setattr(batch_loss, "_BLOCK", block)
        _, found = run(stage(masked, in_batch=in_batch))
        for name, gradient in expected.items():
            if not rows:
                assert torch.equal(found[name], gradient), name
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    _, control = run(plain)
    assert any((found[name] - control[name]).abs().max() > 1e-3 for name in control)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"'vector_distillation' reads vectors of teachers.*s\.t"):
        stage("vector_distillation", teachers=())
    with pytest.raises(ConfigError, match=r"reads vectors of teachers"):
        stage({"false_negatives": {"by": "teachers"}}, teachers=())
    with pytest.raises(ConfigError, match=r"teachers have no effect, because the loss 'infonce'"):
        stage("infonce")
    with pytest.raises(ConfigError, match=r"`teachers` names the same teacher twice"):
        stage("similarity_distillation", teachers=["a", "a"])
    with pytest.raises(
        DataError,
        match=r"step 0 has vectors of 1 teachers, .* needs vectors .* 2 teachers; prepare",
    ):
        run(stage("similarity_distillation"), teachers=TEACHERS[:1])
    config = stage({"false_negatives": BY_TEACHERS})
    assert config.loss.needs == {"teacher_vectors"}
    assert config.loss.model_dump(mode="json")["false_negatives"] == BY_TEACHERS
    both = VectorDistillation(false_negatives={"margin": 0.1}).needs
    assert both == {"teacher_vectors", "teacher_scores"}


def peak(pairs, block, monkeypatch):
    """Bytes that the loss of so many pairs, with masks by a teacher, takes at once."""
    monkeypatch.setattr(batch_loss, "_BLOCK", block)
    values = stage(LOSSES["kl"] | {"false_negatives": BY_TEACHERS}, teachers=["sixteen"])
    config = values.model_copy(
        update={"batch": values.batch.model_copy(update={"global_pairs": pairs})}
    )
    records = made_up_records(pairs)
    tokenizer = ToyModel().tokenizer
    batch = make_step_batch(0, records, NEGATIVES, tokenizer, [MadeUpTeacher(16)])
    cpu = torch.device("cpu")
    with LiveBytes() as live:
        raw = torch.randn(len(batch.tokens), 16, requires_grad=True)
        targets = Targets.of(batch, cpu)
        vectors = torch.nn.functional.normalize(raw, dim=1)
        contrastive_loss(vectors, rows_of(batch, cpu), targets, config, {}).backward()
    return live.peak


def test_memory_is_that_of_a_block_and_not_of_all_rows(monkeypatch):
    block = 32 * 1024
    small, large = (peak(pairs, block, monkeypatch) for pairs in (128, 512))
    vectors = 3 * 512 * 16 * (4 * 6 + 8 + 2 * 3)  # of the model, some copies, and of the teacher
    assert large - small < vectors
    assert peak(512, 2**40, monkeypatch) > 3 * large

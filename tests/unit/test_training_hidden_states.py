"""Errors of hidden states: against transformers' own states, in steps cut in any way; refusals."""

from collections import Counter

import pytest
import torch
from architecture_contract import moved
from made_up_records import made_up_records
from plain_reference import reference_loss
from tiny_folders import TINY, save_tiny, tiny_settings
from tiny_models import save_encoder
from torch import nn

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.models.attention.unpadded import packs
from rayembed.models.layers import layers_of, replace_layers
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.hidden_states import (
    StateErrors,
    check_comparable,
    compared_layers,
)
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

KINDS = ("biencoder", "nvembed", "nomic-moe")
PAIRS, NEGATIVES, WEIGHT = 8, 2, 0.3
BACK = lambda loss, last: loss.backward()  # noqa: E731


def kept(part, layers):
    """Keep only these layers of a model of transformers."""
    replace_layers(part, layers)
    part.config.num_hidden_layers = len(layers)


def stage(weight=WEIGHT):
    values = {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {
            "global_pairs": PAIRS,
            "num_negatives": NEGATIVES,
            "in_batch_negatives": True,
        },
        "loss": {"temperature": 0.1},
        "hidden_states": {"teacher": "whole", "weight": weight},
        "optimizer": {"learning_rate": 0.1},
        "steps": 1,
    }
    return parse(StageConfig, values)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("whole")
    return {kind: save_tiny(kind, home / kind) for kind in TINY}


def student_of(kind, folder, *, layers=None, unpadded="never", change=True, **changes):
    """A copy of the folder's model in training mode, with other weights and maybe fewer layers."""
    if kind == "nvembed":
        changes = {"lora": None, **changes}
    config = tiny_settings(kind, **changes)
    model = build_model(config, dict.fromkeys(config.parts, folder), seed=1)
    if layers is not None:
        kept(model.backbone, layers)
    if change:
        moved(model)
    model.unpadded = unpadded
    return model.train()


def step(model, folder, *, budget=60, cache=True, weight=WEIGHT, backend=None):
    """Report and gradients of one step under the folder's model as teacher.

    Args:
        backend: of the compiler that both models' layers go through.
    """
    teacher = load_model(folder, dtype="float32")
    if backend is not None:
        model.compile_layers(backend)
        teacher.compile_layers(backend)
    check_comparable("teacher", model, teacher)
    config = stage(weight)
    batch = make_step_batch(0, made_up_records(PAIRS), NEGATIVES, model.tokenizer)
    module = EngineModule(model, states=StateErrors(model, teacher))
    torch.manual_seed(1)
    settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
    report = run_step(model, module, BACK, batch, config, settings)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return report, found


def same(left, right):
    """Sums in another order differ by rounding, relative to the largest gradient."""
    assert left.keys() == right.keys()
    size = max(gradient.abs().max() for gradient in right.values())
    assert size > 1e-3
    for name, gradient in right.items():
        assert (left[name] - gradient).abs().max() <= 1e-5 * size, name


def states_of(model, ids):
    """Outputs of the layers for one text, by transformers' own means, without the final norm."""
    norm = getattr(model.backbone, "norm", None)
    if norm is not None:
        model.backbone.norm = nn.Identity()
    output = model.backbone(
        input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
    )
    if norm is not None:
        model.backbone.norm = norm
    return output.hidden_states[1:]


def reference(model, teacher, pairs, *, once=False):
    """Loss and error by a loop over texts; pairs of layers count from 0."""
    records = made_up_records(PAIRS)
    keys = Counter()
    for r in records:
        keys[r.query, "query"] += 1
        for text in (r.positives[0], *(n.text for n in r.negatives[:NEGATIVES])):
            keys[text, "document"] += 1
    error, tokens = 0.0, 0
    for (text, role), uses in keys.items():
        ids = model.tokenizer.collate(model.tokenizer([text], role))["input_ids"]
        own = states_of(model, ids)
        with torch.no_grad():
            wanted = states_of(teacher, ids)
        times = 1 if once else uses
        for i, j in pairs:
            error = error + times * ((own[i] - wanted[j]) ** 2).mean(dim=-1).sum()
        tokens += times * ids.numel()
    plain = reference_loss(model, records, temperature=0.1, num_negatives=NEGATIVES, in_batch=True)
    return plain + WEIGHT * error / tokens, error / tokens


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("kind", ["biencoder", "nvembed"])
def test_loss_and_gradients_are_those_of_transformers_own_states(kind, layers, cache, folders):
    model = student_of(kind, folders[kind], layers=layers)
    pairs = [(0, 0), (1, 1)] if layers is None else [(0, 1)]
    report, found = step(model, folders[kind], cache=cache)
    model.zero_grad()
    teacher = load_model(folders[kind], dtype="float32")
    loss, error = reference(model, teacher, pairs)
    loss.backward()
    assert report.micro_batches > 1
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert report.metrics["hidden_states/error"] == pytest.approx(error.item(), rel=1e-5)
    assert WEIGHT * error > 1e-3 * loss
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    same({n: g for n, g in found.items() if n in expected}, expected)
    once = reference(model, teacher, pairs, once=True)[1]
    assert abs(once - error) > 1e-3 * error, "the control: texts that several rows have count once"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gives_the_same_however_it_is_cut_and_computed(kind, folders):
    folder = folders[kind]
    report, expected = step(student_of(kind, folder), folder)
    assert report.metrics["hidden_states/error"] > 0.01
    ways = {
        "larger micro-batches": ({}, {"budget": 100}),
        "one micro-batch": ({}, {"budget": 10**6}),
        "graphs": ({}, {"cache": False}),
        "packed": ({"unpadded": "always"}, {}),
        "packed graphs": ({"unpadded": "always"}, {"cache": False, "budget": 100}),
    }
    for way, (changes, options) in ways.items():
        model = student_of(kind, folder, **changes)
        assert packs(model) is way.startswith("packed")
        other, found = step(model, folder, **options)
        assert other.loss == pytest.approx(report.loss, rel=1e-5), way
        assert other.metrics == pytest.approx(report.metrics, rel=1e-4), way
        same(found, expected)
    for cache in (True, False):
        model = student_of(kind, folder)
        model.recompute_layers()
        other, found = step(model, folder, cache=cache)
        assert other.loss == pytest.approx(report.loss, rel=1e-6)
        same(found, expected)
    without = step(student_of(kind, folder), folder, weight=1e-9)[1]
    size = max(gradient.abs().max() for gradient in expected.values())
    assert max((without[n] - expected[n]).abs().max() for n in expected) > 1e-3 * size


@pytest.mark.parametrize("kind", KINDS)
def test_an_identical_teacher_has_no_error(kind, folders):
    model = student_of(kind, folders[kind], change=False)
    # In training another kernel computes attention, with other rounding.
    assert 0 < step(model, folders[kind])[0].metrics["hidden_states/error"] < 1e-12
    assert step(model.eval(), folders[kind])[0].metrics["hidden_states/error"] == 0.0


def test_adapted_layers_are_compared(folders):
    folder = folders["nvembed"]
    lora = {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}
    report, expected = step(student_of("nvembed", folder, lora=lora), folder)
    assert any("lora_A" in name for name in expected)
    assert report.metrics["hidden_states/error"] > 1e-4
    graphs = step(student_of("nvembed", folder, lora=lora), folder, cache=False)[1]
    same(graphs, expected)


def test_compiled_layers_are_compared(folders):
    folder = folders["biencoder"]
    report, expected = step(student_of("biencoder", folder), folder)
    torch._dynamo.reset()
    other, found = step(student_of("biencoder", folder), folder, budget=10**6, backend="eager")
    assert other.metrics == pytest.approx(report.metrics, rel=1e-4)
    same(found, expected)


def test_the_teacher_is_no_part_of_what_an_engine_trains_and_keeps_nothing(folders):
    folder = folders["biencoder"]
    model = student_of("biencoder", folder)
    teacher = load_model(folder)
    module = EngineModule(model, states=StateErrors(model, teacher))
    assert list(module.state_dict()) == list(EngineModule(model).state_dict())
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    tokens = model.tokenizer(["where do they live"], "query")
    output = module(model.tokenizer.collate(tokens))
    output.statistics.sum().backward()
    assert all(torch.equal(before[n], v) for n, v in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())
    for one in (model, teacher):
        assert not any(layer._forward_hooks for layer in layers_of(one.trained_parts))


def test_the_last_layers_meet():
    assert compared_layers(3, 3) == [0, 1, 2]
    assert compared_layers(3, 6) == [1, 3, 5]
    assert compared_layers(4, 6) == [1, 2, 4, 5]
    assert compared_layers(1, 12) == [11]


def refused(model, teacher, match):
    with pytest.raises(ConfigError, match=match) as error:
        check_comparable("stages.s.hidden_states.teacher", model, teacher)
    told = str(error.value)
    assert told.startswith("stages.s.hidden_states.teacher: ")
    assert "vector_distillation" in told


def test_a_teacher_whose_states_do_not_line_up_is_refused(folders, tmp_path):
    whole = {kind: load_model(folder) for kind, folder in folders.items()}
    model = student_of("biencoder", folders["biencoder"])
    check_comparable("it", model, whole["biencoder"])
    refused(model, whole["nvembed"], "architecture is nvembed, the model's biencoder")
    for kind in ("causal2vec", "cde"):
        refused(whole[kind], whole[kind], "has 2 transformers")
    wide = load_model(save_encoder(tmp_path / "wide", hidden_size=64))
    refused(model, wide, "64 wide, the model's 32")
    shallow = load_model(folders["biencoder"])
    kept(shallow.backbone, [0])
    refused(model, shallow, "1 layers, fewer than the model's 2")
    other = load_model(save_tiny("biencoder", tmp_path / "prefix", query_prefix="who "))
    refused(model, other, r"before a query the teacher has 'who … ' and the model 'where … '")
    silent = load_model(save_encoder(tmp_path / "silent"))
    check_comparable("it", model, silent)
    larger = load_model(folders["biencoder"])
    larger.tokenizer.pretrained.add_tokens(["neverseen"])
    refused(model, larger, "vocabulary has [0-9]+ tokens, .*, and 1 entries are in one of them")

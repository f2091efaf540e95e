"""Optimisers and schedules: their tables, groups of parameters, Muon against two references."""

import json
import math
import subprocess
import sys

import pytest
import torch
import transformers
from plain_muon import PlainMuon, plain_direction
from toy_model import ToyModel

from rayembed.config.loss import Widths
from rayembed.config.optimizer import OPTIMIZERS, SCHEDULES
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.settings import changed, parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError
from rayembed.losses.siglip import SigLIP
from rayembed.optim.adamw import AdamW
from rayembed.optim.cosine import WSD, Constant, Cosine, Linear
from rayembed.optim.muon import Muon
from rayembed.optim.orthogonal import orthogonal
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.contrastive.engine_module import LossParameters
from rayembed.training.optimizer import learning_rate_factor, parameter_groups, set_learning_rates


def stage(steps=10, **optimizer):
    values = {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 4, "in_batch_negatives": True},
        "optimizer": {"learning_rate": 0.1, **optimizer},
        "steps": steps,
    }
    return parse(StageConfig, values)


def factors(steps=10, **optimizer):
    found = stage(steps, **optimizer)
    return [learning_rate_factor(step, found) for step in range(steps)]


def test_schedules_by_hand():
    assert factors(4) == [1.0, 0.75, 0.5, 0.25]
    assert factors(4, warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]
    assert factors(4, decay_steps=8) == [1.0, 0.875, 0.75, 0.625]
    assert factors(4, schedule="constant") == [1.0] * 4
    cosine = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert factors(4, schedule="cosine") == pytest.approx(cosine)
    falls = [1.0] * 6 + [1.0, 0.75, 0.5, 0.25]
    assert factors(10, schedule={"kind": "wsd", "decay_share": 0.4}) == pytest.approx(falls)
    assert factors(7, schedule={"kind": "wsd", "decay_share": 1.0}) == pytest.approx(factors(7))
    late = factors(10, warmup_steps=2, decay_steps=18, schedule={"kind": "wsd", "decay_share": 0.5})
    assert late == [0.5, 1.0, *[1.0] * 8]


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (40, 10), (100, 50)])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 1.0])
def test_schedules_are_those_of_transformers_but_for_the_warm_up(steps, warmup, share):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    decay = round(share * (steps - warmup))
    theirs = {
        "linear": transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps),
        "cosine": transformers.get_cosine_schedule_with_warmup(optimizer, warmup, steps),
        "constant": transformers.get_constant_schedule_with_warmup(optimizer, warmup),
        "wsd": transformers.get_wsd_schedule(
            optimizer, warmup, decay, num_training_steps=steps, decay_type="linear"
        ),
    }
    for kind, schedule in theirs.items():
        given = {"kind": "wsd", "decay_share": share} if kind == "wsd" else kind
        (rate,) = schedule.lr_lambdas
        expected = [rate(step) for step in range(steps)]
        found = factors(steps, warmup_steps=warmup, schedule=given)
        assert found[warmup:] == pytest.approx(expected[warmup:]), kind
        assert found[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
        if kind == "wsd":
            assert found[-1] == pytest.approx(1 / decay), "a single step of decay changes nothing"


@pytest.mark.parametrize("kind", SCHEDULES.classes())
def test_a_schedule_begins_at_the_peak_and_never_rises(kind):
    found = stage(schedule=kind).optimizer.schedule
    values = [found.factor(step / 100) for step in range(100)]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert (found.factor(1.0) == pytest.approx(0.0, abs=1e-12)) == found.decays


def test_written_settings_are_read_again():
    written = stage().model_dump(mode="json")["optimizer"]
    assert written["schedule"] == "linear"
    assert written["betas"] == [0.9, 0.999]
    again = stage(**{**written, "schedule": WSD().model_dump(mode="json")})
    assert again.optimizer == AdamW(learning_rate=0.1, schedule=WSD())
    assert again.model_dump(mode="json")["optimizer"]["schedule"]["decay_share"] == 0.1
    assert parse(StageConfig, again.model_dump(mode="json")) == again


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["schedule=cosine"], Cosine()),
        (["schedule=constant"], Constant()),
        (["schedule.kind=wsd", "schedule.decay_share=0.3"], WSD(decay_share=0.3)),
        (["schedule={kind: wsd, decay_share: 0.2}"], WSD(decay_share=0.2)),
        (["schedule.kind=linear"], Linear()),
    ],
)
def test_a_schedule_is_set_on_the_command_line(assignments, expected):
    run = get_recipe("biencoder")
    found = override(run, [f"stages.finetune.optimizer.{text}" for text in assignments])
    assert found.stages[0].optimizer.schedule == expected
    assert (found.fingerprint == run.fingerprint) == (expected == Linear())


def test_an_optimizer_is_chosen_on_the_command_line_with_its_settings():
    at, run = "stages.finetune.optimizer", get_recipe("biencoder")
    same = override(run, [f"{at}.kind=adamw"])
    assert same == run
    settings = [f"{at}.kind=muon", f"{at}.learning_rate=0.001", f"{at}.momentum=0.9"]
    assert override(run, settings).stages[0].optimizer == Muon(learning_rate=0.001, momentum=0.9)
    with pytest.raises(ConfigError, match=r"no setting 'stages.finetune.optimizer.momentum'"):
        override(run, [f"{at}.momentum=0.9"])
    with pytest.raises(ConfigError, match=r"optimizer.kind = 'lion': must be one of.*'muon'"):
        override(run, [f"{at}.kind=lion", f"{at}.learning_rate=0.001"])
    with pytest.raises(ConfigError, match=r"decay_steps 20 needs a schedule .* 'constant' does"):
        stage(schedule="constant", decay_steps=20)


def test_a_zero_stage_that_cannot_serve_is_refused_with_the_reason():
    run = override(
        get_recipe("biencoder"),
        ["stages.finetune.optimizer.kind=muon", "stages.finetune.optimizer.learning_rate=0.001"],
    )
    for zero in (0, 1, 2):
        override(run, [f"placement.zero_stage={zero}"])
    with pytest.raises(
        ConfigError, match=r"zero_stage 3 does not support .*'muon'.*one of 0, 1, 2"
    ):
        override(run, ["placement.zero_stage=3"])
    assert Placement().zero_stage in Muon.zero_stages, "the default serves"


def test_settings_of_optimizers_are_read_without_torch():
    code = """
import json, sys
from rayembed.config.optimizer import OPTIMIZERS
from rayembed.config.optimizer import SCHEDULES
found = [list(OPTIMIZERS.classes()), list(SCHEDULES.classes())]
print(json.dumps([*found, sorted({"torch", "ray"} & set(sys.modules))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [list(OPTIMIZERS.classes()), list(SCHEDULES.classes()), []]


def grouped(config, loss=None):
    """Parameter names by (peak, decay, matrices)."""
    model = ToyModel(context=True)
    names = {p: name for name, p in model.named_parameters()}
    names |= {} if loss is None else {p: name for name, p in loss.named_parameters()}
    found = {}
    for group in parameter_groups(model, loss, config):
        key = group["peak"], group["weight_decay"], group["matrices"]
        found.setdefault(key, set()).update(names[p] for p in group["params"])
    return found


def test_parameters_have_the_rates_of_their_groups():
    config = AdamW(
        learning_rate=0.1,
        pooling_learning_rate=0.2,
        loss_learning_rate=0.3,
        weight_decay=0.5,
        rates={"first.*": 0.4, "*.loss": 0.7} | {"loss:bias": 0.6},
    )
    with pytest.raises(ConfigError, match=r"no trained parameter matches '\*.loss'"):
        grouped(config, LossParameters(SigLIP(), Widths(8)))
    config = changed(config, rates={"first.*": 0.4, "loss:bias": 0.6})
    assert grouped(config, LossParameters(SigLIP(), Widths(8))) == {
        (0.1, 0.5, False): {"tokens.weight", "hidden.weight"},
        (0.1, 0.0, False): {"hidden.bias"},
        (0.2, 0.5, False): {"out.weight"},
        (0.2, 0.0, False): {"out.bias"},
        (0.4, 0.5, False): {"first.weight"},
        (0.4, 0.0, False): {"first.bias"},
        (0.3, 0.0, False): {"log_scale"},
        (0.6, 0.0, False): {"bias"},
    }
    with pytest.raises(ConfigError, match=r"'first.bias' matches '\*.bias' and 'first.\*'"):
        grouped(AdamW(learning_rate=0.1, rates={"first.*": 0.4, "*.bias": 0.6}))


def test_muon_takes_weights_of_linear_layers_in_the_backbone():
    config = Muon(learning_rate=0.1, weight_decay=0.5)
    assert grouped(config, LossParameters(SigLIP(), Widths(8))) == {
        (0.1, 0.5, False): {"tokens.weight", "out.weight"},
        (0.1, 0.0, False): {"hidden.bias", "first.bias", "out.bias", "log_scale", "bias"},
        (0.1, 0.5, True): {"hidden.weight", "first.weight"},
    }


def test_a_group_of_matrices_is_cut_where_it_would_be_too_large(monkeypatch):
    monkeypatch.setattr("rayembed.training.optimizer._GROUP", 100)
    groups = parameter_groups(ToyModel(context=True), None, Muon(learning_rate=0.1))
    assert [len(group["params"]) for group in groups if group["matrices"]] == [1, 1]


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (1, 7)])
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    found = 0.2 * math.sqrt(max(shape)) * orthogonal(matrix, 5)
    torch.testing.assert_close(found, plain_direction(matrix), atol=2e-4, rtol=1e-3)
    values = torch.linalg.svdvals(orthogonal(torch.randn(20, 30), 5))
    assert 0.6 < values.min() < values.max() < 1.3


def after(steps, make, bfloat16=False):
    """Parameters after some steps over made-up gradients, by name."""
    model = ToyModel(context=True)
    named = dict(model.named_parameters())
    step = make(model)
    generator = torch.Generator().manual_seed(3)
    for number in range(steps):
        for p in named.values():
            p.grad = torch.randn(p.shape, generator=generator)
        step(number)
    return {name: p.detach() for name, p in named.items()}


def ours(config, bfloat16):
    def make(model):
        optimizer = config.build(parameter_groups(model, None, config), bfloat16=bfloat16)

        def step(number):
            set_learning_rates(optimizer, 1.0 - number / 5)
            optimizer.step()

        return step

    return make


def theirs(kind):
    """Muon of torch or written with singular values, and torch's AdamW beside it."""

    def make(model):
        named = dict(model.named_parameters())
        matrices = [named["hidden.weight"], named["first.weight"]]
        others = [p for p in named.values() if all(p is not m for m in matrices)]
        decayed = [p for p in others if p.ndim >= 2]
        adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.5},
                {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
            ]
        )
        if kind == "torch":
            muon = torch.optim.Muon(
                matrices, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            )
        else:
            muon = PlainMuon(matrices, weight_decay=0.5)

        def step(number):
            rate = 0.1 * (1.0 - number / 5)
            for group in adamw.param_groups + getattr(muon, "param_groups", []):
                group["lr"] = rate
            muon.step(*([] if kind == "torch" else [rate]))
            adamw.step()

        return step

    return make


@pytest.mark.parametrize(("kind", "bfloat16"), [("torch", True), ("singular values", False)])
def test_muon_is_that_of_its_references(kind, bfloat16):
    config = Muon(learning_rate=0.1, weight_decay=0.5)
    found, expected = after(4, ours(config, bfloat16)), after(4, theirs(kind))
    for name in expected:
        # In bfloat16 both round alike but for the order of a product; AdamW's part is the same.
        atol = 2e-3 if bfloat16 else 1e-5
        torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=1e-4, msg=name)
    control = after(4, ours(AdamW(learning_rate=0.1, weight_decay=0.5), False))
    assert (control["hidden.weight"] - found["hidden.weight"]).abs().max() > 0.1
    assert torch.equal(control["tokens.weight"], found["tokens.weight"])


def test_updates_of_a_matrix_are_as_large_as_those_of_adamw():
    """Root mean square 0.2, whatever the shape (arXiv 2502.16982, section 2.2)."""
    torch.manual_seed(0)
    for shape in ((64, 64), (32, 128), (128, 32)):
        update = plain_direction(torch.randn(shape))
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_what_has_no_gradient_stays():
    config = Muon(learning_rate=0.1, weight_decay=0.5)
    model = ToyModel(context=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = config.build(parameter_groups(model, None, config), bfloat16=False)
    set_learning_rates(optimizer, 1.0)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

"""A layer with an adapter as one operation: peft's results, with less kept and less written.

Bits of dropout by torch's operations here; `tests/cuda_wheel` has Triton's values.
"""

import copy
import pickle
from functools import partial

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rayembed.config.backbone import LoraConfig
from rayembed.machine.hardware import say_once
from rayembed.models.adapters import adapted_linear, adapter_bits
from rayembed.models.adapters.adapted_linear import AdaptedLinear
from rayembed.models.adapters.lora import add_lora, merge_lora, merged_state
from rayembed.training.memory.graph_room import saved_bytes

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6}


class Pair(nn.Module):
    """Two layers on one input, and a dropout of their own after them."""

    def __init__(self, inputs, outputs, bias):
        super().__init__()
        self.left = nn.Linear(inputs, outputs, bias=bias)
        self.right = nn.Linear(inputs, outputs, bias=bias)
        self.after = nn.Dropout(0.25)

    def forward(self, x):
        return self.after(self.left(x) * self.right(x).tanh())


def built(inputs, outputs, bias, rank, dropout, dtype, *, peft_layers=False):
    torch.manual_seed(0)
    model = Pair(inputs, outputs, bias)
    config = LoraConfig(
        rank=rank, alpha=3 * rank, dropout=dropout, target_modules=("left", "right")
    )
    add_lora(model, config, setting="lora")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    layers = [m for m in model.modules() if isinstance(m, AdaptedLinear)]
    assert len(layers) == 2
    for layer in layers:
        layer.__class__ = Linear if peft_layers else AdaptedLinear
    return model.to(dtype).train()


def results(model, x, grad, *, autocast=False):
    """Output, gradients, and the next random numbers."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    following = torch.rand(3)
    out.backward(grad.to(out.dtype))
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, "next": following, **found}


def apart(left, right):
    """Largest difference of each result, as a share of its largest value."""
    assert left.keys() == right.keys()
    assert all(left[n].dtype == right[n].dtype for n in left)
    return {
        n: float((left[n].double() - right[n].double()).abs().max() / right[n].abs().max())
        for n in right
    }


@pytest.fixture(params=[False, True], ids=["numbers", "bits"])
def bits(request, monkeypatch):
    """Dropout's numbers as CPUs keep them, or bits as GPUs do."""
    monkeypatch.setattr(adapted_linear, "keeps_bits", lambda *_: request.param)
    return request.param


class DroppedByBits(nn.Module):
    """Dropout of peft's layer, by the bits that rayembed's draws."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        seed = torch.empty(1, dtype=torch.int64).random_()
        keep = adapter_bits.share_kept(self.p)
        drawn = adapter_bits.draw_bits(seed, *x.flatten(0, -2).shape, keep)
        return x * adapter_bits.unpacked(drawn, x.shape[-1]).view(x.shape) / keep


def pefts(*sizes, bits):
    """The model by peft's own layers; with bits these drop the same numbers."""
    model, dropout = built(*sizes, peft_layers=True), sizes[4]
    if bits and dropout:
        for layer in (model.left, model.right):
            (name,) = layer.active_adapters
            layer.lora_dropout[name] = DroppedByBits(dropout)
    return model


DRAWN = np.random.default_rng(20_261)
CASES = [
    (
        *(int(DRAWN.integers(1, 70)) for _ in range(2)),
        bool(DRAWN.integers(2)),
        int(DRAWN.integers(1, 9)),
        float(DRAWN.choice([0.0, 0.05, 0.5])),
        tuple(DRAWN.integers(1, 7, size=DRAWN.integers(1, 4)).tolist()),
    )
    for _ in range(24)
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_drawn_layers_give_what_pefts_give(case, dtype, bits):
    inputs, outputs, bias, rank, dropout, shape = case
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, inputs, generator=draw, dtype=dtype)
    grad = torch.randn(*shape, outputs, generator=draw, dtype=dtype)
    sizes = inputs, outputs, bias, rank, dropout, dtype
    expected = results(pefts(*sizes, bits=bits), x, grad)
    found = apart(results(built(*sizes), x, grad), expected)
    assert found.pop("next") == 0, "as many random numbers are drawn"
    assert max(found.values()) < TOLERANCES[dtype], found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rounded_layers_are_no_further_from_exact_ones_than_pefts(dropout, autocast, bits):
    """In bfloat16, and in float32 with products in bfloat16."""
    sizes = 96, 160, True, 8, dropout
    dtype = torch.float32 if autocast else torch.bfloat16
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(5, 9, 96, generator=draw).bfloat16()
    grad = torch.randn(5, 9, 160, generator=draw).bfloat16()

    def off(peft_layers):
        kind = partial(pefts, bits=bits) if peft_layers else built
        model = kind(*sizes, torch.bfloat16).to(dtype)
        found = results(model, x.to(dtype), grad, autocast=autocast)
        exact = pefts(*sizes, torch.bfloat16, bits=bits).double()
        right = results(exact, x.double(), grad)
        return {
            n: float((found[n].double() - right[n].double()).norm() / right[n].double().norm())
            for n in right
        }

    ours, theirs = off(False), off(True)
    assert ours.pop("next") == theirs.pop("next") == 0
    for name, value in ours.items():
        assert value < 1.05 * theirs[name], name


def test_a_graph_holds_the_input_once_and_no_copies_of_it(bits):
    """Both layers' common input, their thin products and a bit a number; on CPUs what peft keeps,
    as reading bits takes them longer.
    """
    tokens, width = 50, 100
    model = built(width, 160, False, 4, 0.5, torch.float32)
    x = torch.randn(tokens, width, requires_grad=True)
    taken = saved_bytes(lambda: [layer(x) for layer in (model.left, model.right)], model)
    theirs = built(width, 160, False, 4, 0.5, torch.float32, peft_layers=True)
    before = saved_bytes(lambda: [layer(x) for layer in (theirs.left, theirs.right)], theirs)
    size, thin = 4 * tokens * width, 4 * tokens * 4
    assert before == 2 * (2 * size + thin)
    assert taken == (size + 2 * (thin + tokens * 13) if bits else before)


def test_a_repeated_pass_drops_what_the_first_one_dropped(bits):
    model = built(40, 24, True, 4, 0.5, torch.float64)
    x = torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    plain = results(model, x.detach(), torch.ones(6, 24))
    model.zero_grad()
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.rand(100)  # what others draw before the backward pass
    out.backward(torch.ones(6, 24))
    torch.testing.assert_close(x.grad, plain["x"], rtol=0, atol=0)


def test_an_input_without_gradient_gives_those_of_the_adapter_alone(bits):
    model, x = built(40, 24, True, 4, 0.5, torch.float64), torch.randn(6, 40).double()
    expected = results(model, x, torch.ones(6, 24))
    model.zero_grad()
    torch.manual_seed(1)
    model(x).backward(torch.ones(6, 24))
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=0)


def test_a_layer_that_must_be_called_is_called():
    """An engine that partitions weights gathers them in hooks of the frozen layer."""
    model, x = built(40, 24, True, 4, 0.5, torch.float64), torch.randn(6, 40).double()
    expected = results(model, x, torch.ones(6, 24))
    seen = []
    model.left.base_layer.register_forward_pre_hook(lambda *_: seen.append("left"))
    model.zero_grad()
    found = apart(results(model, x, torch.ones(6, 24)), expected)
    assert seen == ["left"]
    assert max(found.values()) < 1e-13
    with torch.no_grad():
        model.eval()
        whole = model(x)
        model.right.enable_adapters(False)
        assert (model(x) - whole).abs().max() > 1e-3


def test_names_copies_and_merging_are_pefts():
    model = built(40, 24, True, 4, 0.0, torch.float64)
    pefts = built(40, 24, True, 4, 0.0, torch.float64, peft_layers=True)
    assert list(model.state_dict()) == list(pefts.state_dict())
    x = torch.randn(6, 40, dtype=torch.float64)
    model.eval()
    out = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), out, rtol=0, atol=0)
    plain = Pair(40, 24, True).double().eval()
    plain.load_state_dict(merged_state(model))
    torch.testing.assert_close(plain(x), out, rtol=1e-6, atol=1e-6)  # merged in float32
    merge_lora(model)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_operation_keeps_torchs_rules(dropout, bits):
    """Its shapes, gradients and schema, as a compiler relies on them."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(3, 5, 12), (20, 12), (20,), (4, 12), (20, 4)]
    values = [torch.randn(size, generator=draw) for size in sizes]
    for place in (0, 3, 4):
        values[place].requires_grad_()
    for bias in (values[2], None):
        values[2] = bias
        torch.library.opcheck(torch.ops.rayembed.adapted_linear.default, (*values, 2.0, dropout))


def test_the_operations_on_bits_keep_torchs_rules():
    own, draw = torch.ops.rayembed, torch.Generator().manual_seed(0)
    x, down, of_thin = (torch.randn(size, generator=draw) for size in [(9, 21), (4, 21), (9, 4)])
    drawn = own.draw_bits(torch.tensor([5]), 9, 21, 0.5)
    for operation, values in {
        own.draw_bits: (torch.tensor([5]), 9, 21, 0.5),
        own.kept_down: (x, drawn, down, 0.5),
        own.kept_of_down: (of_thin, x, drawn, 0.5),
        own.kept_of_input: (of_thin, down, drawn, 0.5),
    }.items():
        torch.library.opcheck(operation.default, values)


def test_a_compiled_layer_is_one_graph_and_drops_the_same(bits):
    model, x = built(40, 24, True, 4, 0.5, torch.float64), torch.randn(6, 40).double()
    expected = results(model, x, torch.ones(6, 24))
    model.zero_grad()
    torch._dynamo.reset()
    for layer in (model.left, model.right):
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    found = apart(results(model, x, torch.ones(6, 24)), expected)
    assert max(found.values()) < 1e-13


def test_deterministic_algorithms_are_no_hindrance(bits):
    torch.use_deterministic_algorithms(True)
    try:
        model = built(40, 24, True, 4, 0.5, torch.float32)
        first, second = (results(model, torch.ones(6, 40), torch.ones(6, 24)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first["out"], second["out"])


def test_bits_are_those_of_philox():
    """Known answers of Philox4x32 with ten rounds, of the authors' Random123."""
    low = 0xFFFFFFFF
    for place, seed, expected in [
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ]:
        made = adapter_bits._philox(torch.tensor([place]), torch.tensor([seed]))
        assert [int(one) & low for one in made] == expected
    half = 0x8000
    numbers = (number >> shift & 0xFFFF for number in expected for shift in (0, 16))
    (byte,) = adapter_bits.draw_bits(torch.tensor([0]), 1, 8, 0.5).tolist()[0]
    assert [byte >> place & 1 for place in range(8)] == [int(n < half) for n in numbers]


@pytest.mark.parametrize("dropout", [0.0001, 0.05, 0.1, 0.5, 0.9])
def test_bits_are_independent_draws_of_the_probability(dropout):
    """Within five standard deviations: their mean, and pairs of them side by side, below one
    another, of other seeds and a byte or a word apart.
    """
    rows, columns = 900, 1003
    keep = adapter_bits.share_kept(dropout)
    assert keep == pytest.approx(1 - dropout, abs=2**-17)
    seeds = (torch.tensor([seed]) for seed in (1, 2, 1 << 40))
    drawn = [
        adapter_bits.unpacked(adapter_bits.draw_bits(seed, rows, columns, keep), columns).double()
        for seed in seeds
    ]
    spread = (keep * (1 - keep)) ** 0.5

    def apart(values, deviation):
        return float(values.mean().abs()) / (deviation / values.numel() ** 0.5)

    off = [one - keep for one in drawn]
    for one in off:
        assert apart(one, spread) < 5
        assert one.mean(0).abs().max() < 6 * spread / rows**0.5 + 1 / rows
        assert one.mean(1).abs().max() < 6 * spread / columns**0.5 + 1 / columns
    first, *others = off
    for other in others:
        assert apart(first * other, spread**2) < 5
    for rows_on, columns_on in [(0, 1), (0, 2), (0, 7), (0, 8), (0, 32), (1, 0), (2, 0), (1, 1)]:
        pairs = first[rows_on:, columns_on:] * first[: rows - rows_on, : columns - columns_on]
        assert apart(pairs, spread**2) < 5, (rows_on, columns_on)


def test_a_gradient_is_summed_in_parts_of_tokens_alone(monkeypatch):
    monkeypatch.setattr(adapter_bits, "SPLIT", 4)
    draw = torch.Generator().manual_seed(0)
    x, of_thin = (torch.randn(11, width, generator=draw) for width in (21, 3))
    drawn = adapter_bits.draw_bits(torch.tensor([5]), 11, 21, 0.75)
    parts = torch.ops.rayembed.kept_of_down(of_thin, x, drawn, 0.75)
    assert parts.shape == (3, 3, 21)
    whole = of_thin.t() @ (x * adapter_bits.unpacked(drawn, 21)) / 0.75
    torch.testing.assert_close(parts.sum(0), whole)


@pytest.fixture
def tried():
    """The trial of kernels without what it knows of this process."""
    adapter_bits._why_not.cache_clear()
    say_once.cache_clear()
    yield partial(adapter_bits.kernels_work, torch.device("cpu"), rank=5)
    adapter_bits._why_not.cache_clear()
    say_once.cache_clear()


def test_kernels_are_tried_once_before_they_are_used(tried, monkeypatch, caplog):
    asked = []
    real = adapter_bits.differences
    monkeypatch.setattr(
        adapter_bits, "differences", lambda *given: asked.append(given) or real(*given)
    )
    with FakeTensorMode():  # as in a compiler
        assert tried(dtype=torch.bfloat16)
    assert tried(dtype=torch.bfloat16)
    assert len(asked) == 1
    assert not caplog.records


@pytest.mark.parametrize("fault", ["wrong", "nan", "raises"])
def test_kernels_that_fail_or_are_wrong_are_not_used_which_is_said_once(
    tried, fault, monkeypatch, caplog
):
    def fails(*given):
        if fault == "raises":
            raise RuntimeError("no compiler")
        return {"kept_down": 0.5 if fault == "wrong" else float("nan")}

    monkeypatch.setattr(adapter_bits, "differences", fails)
    assert not any(tried(dtype=torch.float32) for _ in range(3))
    (record,) = caplog.records
    assert ("no compiler" if fault == "raises" else "kept_down") in record.message


def test_types_without_kernels_keep_numbers(tried, caplog):
    assert not tried(dtype=torch.float64)
    assert "float64" in caplog.text


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 0)])
def test_no_texts_and_a_lone_vector_are_inputs_too(shape, dropout):
    model = built(16, 6, True, 2, dropout, torch.float32)
    x = torch.randn(*shape, 16, requires_grad=True)
    out = model(x)
    assert out.shape == (*shape, 6)
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_float64_stays_under_autocast():
    model = built(16, 6, True, 2, 0.0, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.left(torch.randn(2, 16, dtype=torch.float64)).dtype == torch.float64


def test_second_derivatives_are_refused():
    model = built(16, 6, True, 2, 0.0, torch.float32)
    x = torch.randn(2, 16, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()


def test_a_bias_of_the_adapter_and_hooks_of_its_parts_take_pefts_way():
    model = nn.Sequential(nn.Linear(16, 6))
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_bias=True)
    config._register_custom_module({nn.Linear: AdaptedLinear})
    peft.inject_adapter_in_model(config, model)
    layer = model[0]
    assert isinstance(layer, AdaptedLinear)
    nn.init.normal_(layer.lora_B["default"].bias)
    x = torch.randn(3, 16)
    found = layer(x)
    layer.__class__ = Linear
    torch.testing.assert_close(found, layer(x))
    plain, called = built(16, 6, True, 2, 0.0, torch.float32).left, []
    plain.lora_A["default"].register_forward_hook(lambda *_: called.append("A"))
    plain.base_layer.register_full_backward_hook(lambda *_: called.append("base"))
    plain(torch.randn(3, 16, requires_grad=True)).sum().backward()
    assert called == ["A", "base"]


def test_an_adapter_that_the_layer_lacks_is_none_of_its_own():
    layer = built(16, 6, True, 2, 0.0, torch.float32).left
    x = torch.randn(3, 16)
    layer._active_adapter = "other"
    torch.testing.assert_close(layer(x), layer.base_layer(x))

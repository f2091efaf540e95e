"""A layer with an adapter as one operation: peft's results, with less kept and less written."""

import copy
import pickle

import numpy as np
import pytest
import torch
from peft.tuners.lora.layer import Linear
from torch import nn

from rayembed.config.lora import LoraConfig
from rayembed.models import adapted_linear
from rayembed.models.adapted_linear import AdaptedLinear
from rayembed.models.lora import add_lora, merge_lora, merged_state
from rayembed.training.graph_room import saved_bytes

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


@pytest.fixture(params=[False, True], ids=["kept", "drawn again"])
def redraws(request, monkeypatch):
    """Dropout's numbers as CPUs keep them, or as GPUs draw them again."""
    monkeypatch.setattr(adapted_linear, "redraws", lambda _: request.param)
    return request.param


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
def test_drawn_layers_give_what_pefts_give(case, dtype, redraws):
    inputs, outputs, bias, rank, dropout, shape = case
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, inputs, generator=draw, dtype=dtype)
    grad = torch.randn(*shape, outputs, generator=draw, dtype=dtype)
    sizes = inputs, outputs, bias, rank, dropout, dtype
    expected = results(built(*sizes, peft_layers=True), x, grad)
    found = apart(results(built(*sizes), x, grad), expected)
    assert found.pop("next") == 0, "as many random numbers are drawn"
    if not dropout or not redraws:  # else torch's operation for GPUs rounds its noise otherwise
        assert max(found.values()) < TOLERANCES[dtype], found
    else:
        assert max(found.values()) < 4 * TOLERANCES[dtype], found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rounded_layers_are_no_further_from_exact_ones_than_pefts(dropout, autocast, redraws):
    """In bfloat16, and in float32 with products in bfloat16."""
    sizes = 96, 160, True, 8, dropout
    dtype = torch.float32 if autocast else torch.bfloat16
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(5, 9, 96, generator=draw).bfloat16()
    grad = torch.randn(5, 9, 160, generator=draw).bfloat16()

    def off(peft_layers):
        model = built(*sizes, torch.bfloat16, peft_layers=peft_layers).to(dtype)
        found = results(model, x.to(dtype), grad, autocast=autocast)
        exact = built(*sizes, torch.bfloat16, peft_layers=True).double()
        right = results(exact, x.double(), grad)
        return {
            n: float((found[n].double() - right[n].double()).norm() / right[n].double().norm())
            for n in right
        }

    ours, pefts = off(False), off(True)
    assert ours.pop("next") == pefts.pop("next") == 0
    for name, value in ours.items():
        assert value < 1.05 * pefts[name], name


def test_a_graph_holds_the_input_once_and_no_copies_of_it(redraws):
    """Both layers' common input, their thin products and the generator's state; on CPUs what peft
    keeps, as drawing takes them longer.
    """
    tokens, width = 50, 96
    model = built(width, 160, False, 4, 0.5, torch.float32)
    x = torch.randn(tokens, width, requires_grad=True)
    taken = saved_bytes(lambda: [layer(x) for layer in (model.left, model.right)], model)
    pefts = built(width, 160, False, 4, 0.5, torch.float32, peft_layers=True)
    before = saved_bytes(lambda: [layer(x) for layer in (pefts.left, pefts.right)], pefts)
    size, thin = 4 * tokens * width, 4 * tokens * 4
    assert before == 2 * (2 * size + thin)
    expected = size + 2 * (thin + len(torch.get_rng_state())) if redraws else before
    assert taken == expected


def test_a_repeated_pass_drops_what_the_first_one_dropped(redraws):
    model = built(40, 24, True, 4, 0.5, torch.float64)
    x = torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    plain = results(model, x.detach(), torch.ones(6, 24))
    model.zero_grad()
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.rand(100)  # what others draw before the backward pass
    out.backward(torch.ones(6, 24))
    torch.testing.assert_close(x.grad, plain["x"], rtol=0, atol=0)


def test_an_input_without_gradient_gives_those_of_the_adapter_alone(redraws):
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


def test_the_operation_keeps_torchs_rules():
    """Its shapes, gradients and schema, as a compiler relies on them."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(3, 5, 12), (20, 12), (20,), (4, 12), (20, 4)]
    values = [torch.randn(size, generator=draw) for size in sizes]
    for place in (0, 3, 4):
        values[place].requires_grad_()
    for bias in (values[2], None):
        values[2] = bias
        torch.library.opcheck(torch.ops.rayembed.adapted_linear.default, (*values, 2.0, 0.0))

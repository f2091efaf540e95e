"""Products of experts: by which kernel, what the host waits for, and how sums are rounded."""

import pytest
import torch
from host_waits import COPY_TO_HOST, META, host_waits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rayembed.models.experts import ExpertMlps, has_grouped_kernel

ROWS, HIDDEN, INNER = 2048, 16, 8


def mlps(dtype=torch.bfloat16, device="cpu", products="grouped"):
    made = ExpertMlps(HIDDEN, INNER, 2, hidden_bias=True)
    torch.manual_seed(1)
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.3)
    made.products = products
    return made.to(device, dtype)


class AtomicSums(TorchDispatchMode):
    """Sums into rows as CUDA has them: one addend after the other, rounded each time."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in ("index_add", "index_add_"):
            return func(*args, **(kwargs or {}))
        self.number += 1
        into, dim, index, addends = args
        assert dim == 0
        out = into if func.overloadpacket.__name__ == "index_add_" else into.clone()
        for row, addend in zip(index.tolist(), addends, strict=True):
            out[row] += addend
        return out


def bias_gradient(dtype):
    """(F,) gradient of the first expert's bias, whose rows are all alike."""
    mlp = mlps(dtype)
    rows = torch.ones(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    counts = torch.tensor([ROWS, 0])
    with AtomicSums():
        made = mlp(rows, counts)
        made.backward(torch.ones_like(made))
    return mlp.b1.grad[:INNER].double()


def test_the_bias_of_many_rows_has_the_sum_of_their_gradients():
    exact = bias_gradient(torch.float32)
    # Roundings of the few numbers that were added up, and of their sum.
    assert (bias_gradient(torch.bfloat16) - exact).norm() < 0.02 * exact.norm()


def test_the_control_such_sums_stop_growing_in_bfloat16():
    total, sums = torch.zeros(1, 1, dtype=torch.bfloat16), AtomicSums()
    with sums:
        total.index_add_(
            0, torch.zeros(ROWS, dtype=torch.int64), torch.ones_like(total).expand(ROWS, 1)
        )
    assert (sums.number, total.item()) == (1, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_the_loop(dtype):
    rows = torch.randn(60, HIDDEN).to(dtype)
    counts = torch.tensor([23, 37])
    found = []
    for products in ("grouped", "loop"):
        mlp, own = mlps(dtype, products=products), rows.clone().requires_grad_()
        made = mlp(own, counts)
        (made * rows).sum().backward()
        found.append([made, own.grad, *(weight.grad for weight in mlp.parameters())])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for left, right in zip(*found, strict=True):
        assert (left - right).norm() <= tolerance * right.norm()


CAPABILITIES = {
    (7, 5): False,
    (8, 0): False,  # A100: torch's own loop there reads the counts at each of six products
    (8, 9): False,
    (9, 0): True,
    (10, 0): True,
    (10, 3): True,
    (12, 0): False,
}


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_grouped_kernel_is_taken_where_torch_has_a_fused_one(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = torch.zeros(2 * INNER, HIDDEN, dtype=torch.bfloat16).as_subclass(OnGpu)
    assert has_grouped_kernel(weight, 2) == CAPABILITIES[capability]
    assert not has_grouped_kernel(weight.float(), 2)
    assert not has_grouped_kernel(weight[:, 4:], 2)
    assert not has_grouped_kernel(weight.as_subclass(torch.Tensor), 2)


@pytest.mark.parametrize(("products", "reads"), [("grouped", 0), ("loop", 1)])
def test_the_loop_reads_the_counts_once_in_both_passes(products, reads, monkeypatch):
    mlp = mlps(device=META, products=products)
    rows = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device=META, requires_grad=True)
    counts = torch.zeros(2, dtype=torch.int64, device=META)
    if reads:  # of a tensor without values the sizes would be zeros
        monkeypatch.setattr(
            torch, "split", lambda x, sizes: [x[: ROWS // 2], x[ROWS // 2 :]][: len(sizes)]
        )
    with host_waits(monkeypatch) as waits:
        made = mlp(rows, counts)
        made.backward(torch.zeros_like(made))
    assert sum(waits.kinds.values()) == waits.kinds[COPY_TO_HOST] == reads

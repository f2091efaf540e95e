"""Attention without padding against SDPA with it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rayembed.models.attention.varlen import reference, settled_kernel, varlen_attention
from rayembed.models.nvembed.pooling import attend_by_products

LENGTHS = [7, 1, 4, 12]
HEADS, WIDTH = 4, 8


def ends_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def made(key_heads, lengths=LENGTHS, *, width=WIDTH, dtype=torch.float64, seed=0):
    """Queries, keys and values of packed texts."""
    generator = torch.Generator().manual_seed(seed)

    def one(heads):
        values = torch.randn(sum(lengths), heads, width, generator=generator, dtype=torch.float64)
        return (1.5 * values).to(dtype).requires_grad_()

    return one(HEADS), one(key_heads), one(key_heads)


def padded_attention(query, key, value, lengths, *, causal, window, scale):
    """The same by SDPA on padded texts with a mask, whose key heads are copied."""
    longest = max(lengths)

    def pad(packed):
        rows = [
            torch.nn.functional.pad(text, (0, 0, 0, 0, 0, longest - len(text)))
            for text in packed.split(lengths)
        ]
        return torch.stack(rows).transpose(1, 2).repeat_interleave(HEADS // packed.shape[1], 1)

    places = torch.arange(longest)
    seen = (places[None, :] < torch.tensor(lengths)[:, None])[:, None, None, :]
    away = places[:, None] - places[None, :]
    if causal:
        seen = seen & (away >= 0)
    if window is not None:
        seen = seen & (away.abs() < window)
    # A padded query would see nothing behind a window; nobody reads what it gets.
    seen = seen | (places[:, None] == places[None, :])
    attended = scaled_dot_product_attention(*map(pad, (query, key, value)), seen, scale=scale)
    rows = attended.transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def with_gradients(output, inputs):
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(output.shape, generator=generator).to(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


CASES = pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3), (True, 1)]
)


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
@CASES
def test_values_and_gradients_are_those_of_padded_sdpa(key_heads, scale, causal, window):
    inputs = made(key_heads)
    ends, longest = ends_of(LENGTHS), (max(LENGTHS), max(LENGTHS))
    settings = {"causal": causal, "window": window, "scale": scale}
    output = varlen_attention(*inputs, ends, ends, longest, **settings)
    expected = padded_attention(*inputs, LENGTHS, **settings)
    found = zip(with_gradients(output, inputs), with_gradients(expected, inputs), strict=True)
    for mine, other in found:
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-10)
    other = varlen_attention(*inputs, ends, ends, longest, causal=not causal, scale=scale)
    assert (other - expected).abs().max() > 0.1


def test_queries_of_another_number_than_keys():
    query, _, _ = made(2, [3, 3, 3, 3])
    _, key, value = made(2)
    output = varlen_attention(query, key, value, ends_of([3] * 4), ends_of(LENGTHS), (3, 12))
    texts = zip(query.split(3), key.split(LENGTHS), value.split(LENGTHS), strict=True)
    for place, (q, k, v) in enumerate(texts):
        expected = scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), enable_gqa=True
        )
        torch.testing.assert_close(output[3 * place : 3 * place + 3], expected.transpose(0, 1))


def test_texts_do_not_see_each_other():
    query, key, value = made(2)
    ends, longest = ends_of(LENGTHS), (12, 12)
    changed = torch.cat([value[:7], value[7:] + 1.0])
    first, second = (varlen_attention(query, key, v, ends, ends, longest) for v in (value, changed))
    assert torch.equal(first[:7], second[:7])
    assert (first[7:] - second[7:]).abs().min() > 0.1


def test_narrow_types_are_computed_in_float32():
    exact = made(2)
    rounded = [x.detach().to(torch.bfloat16) for x in exact]
    ends, longest = ends_of(LENGTHS), (12, 12)
    output = varlen_attention(*rounded, ends, ends, longest)
    assert output.dtype == torch.bfloat16
    expected = varlen_attention(*(x.double() for x in rounded), ends, ends, longest)
    # One rounding to 8 bits, of the result.
    torch.testing.assert_close(output.double(), expected, atol=0, rtol=2**-8)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_products_are_sdpa(scale):
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(1, 2, number, 300, generator=generator, dtype=torch.float64).requires_grad_()
        for number in (50, 16, 16)
    ]
    mine = with_gradients(attend_by_products(*inputs, scale=scale), inputs)
    theirs = with_gradients(scaled_dot_product_attention(*inputs, scale=scale), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


def test_products_in_bfloat16_are_about_as_exact_as_sdpa():
    generator = torch.Generator().manual_seed(3)
    exact = [
        torch.randn(1, 2, number, 300, generator=generator, dtype=torch.float64)
        for number in (50, 16, 16)
    ]
    inputs = [x.to(torch.bfloat16) for x in exact]
    right = scaled_dot_product_attention(*(x.double() for x in inputs))
    mine = (attend_by_products(*inputs).double() - right).norm()
    theirs = (scaled_dot_product_attention(*inputs).double() - right).norm()
    assert mine < 2 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("width", [64, 128, 256])
@CASES
def test_the_kernel_is_the_reference(causal, window, width, key_heads, dtype):
    settled_kernel(torch.device("cuda", 0))
    lengths = [70, 1, 300, 128]
    exact = made(key_heads, lengths, width=width)
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    rounded = [x.detach().double().cpu().requires_grad_() for x in inputs]
    longest = (max(lengths), max(lengths))
    ends = ends_of(lengths)
    settings = {"causal": causal, "window": window}
    on_gpu = ends.cuda()
    mine = varlen_attention(*inputs, on_gpu, on_gpu, longest, **settings)
    right = varlen_attention(*rounded, ends, ends, longest, **settings)
    found = zip(with_gradients(mine, inputs), with_gradients(right, rounded), strict=True)
    for one, other in found:
        # Who sees one key alone has no gradient through its weight, which is 1: exactly 0 then.
        assert (one.double().cpu() - other).norm() < (2e-2 * other.norm() or 1e-3)


@pytest.mark.gpu
def test_no_kernel_for_other_types_and_widths():
    ends = ends_of(LENGTHS, "cuda")
    for width, dtype in ((8, torch.float32), (12, torch.bfloat16), (264, torch.bfloat16)):
        inputs = [x.detach().to("cuda", dtype) for x in made(2, width=width)]
        with pytest.raises(ValueError, match="no kernel"):
            varlen_attention(*inputs, ends, ends, (12, 12))


def test_the_reference_is_what_a_cpu_computes():
    inputs = made(2)
    ends = ends_of(LENGTHS)
    found = varlen_attention(*inputs, ends, ends, (12, 12), causal=True, window=3, scale=0.5)
    assert torch.equal(found, reference(*inputs, ends, ends, (12, 12), (2, 0), 0.5))

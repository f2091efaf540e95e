"""Triton kernels for GPUs that implement the dropout operations of `adapter_bits`.

T tokens, I inputs, R rank; a byte of bits has eight columns, the first one lowest. Kernels read
inputs and bits once for each 64 ranks, and write once. Sums are in float32 and in one order, so
that the same numbers give the same results, on any GPU.
"""

# Triton's language has no types, and its constants are written in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024
"""Of bits, that one program draws."""
MOST_RANKS = 64
"""Of one program."""


def tiles(dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Return the tile size (tokens, inputs) of each kernel, chosen so that registers do not spill
    on sm_80 and sm_90.

    Products of float32 are not those of tensor cores, and hold their factors in registers.
    """
    down, of_down, of_input = (32, 128), (64, 64), (64, 128)
    if dtype == torch.float32:
        down, of_down, of_input = (32, 64), (16, 32), (32, 64)
    sizes = {down_kernel: down, of_down_kernel: of_down, of_input_kernel: of_input}
    return {k.__name__: {"TOKENS": t, "INPUTS": i} for k, (t, i) in sizes.items()}


def ranks(rank: int) -> int:
    """Round the adapter rank up to the tile's size: a power of two, at least 16, as matrix products
    need.
    """
    return min(MOST_RANKS, max(16, int(triton.next_power_of_2(rank))))


@triton.jit
def _decided(number, limit):
    """Make two dropout decisions from 32 random bits, one from each half."""
    return ((number << 16) < limit).to(tl.int32) | ((number < limit).to(tl.int32) << 1)


@triton.jit(do_not_specialize=["size", "limit"])
def draw_kernel(seed, bits, size, limit, BYTES: tl.constexpr):
    """Draw dropout bits, eight to a byte; each uses 16 of the 128 Philox bits of its byte's
    position.
    """
    place = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    one, two, three, four = tl.randint4x(tl.load(seed), place)
    below = limit.to(tl.uint32) << 16
    found = _decided(one, below) | (_decided(two, below) << 2)
    found |= (_decided(three, below) << 4) | (_decided(four, below) << 6)
    tl.store(bits + place, found.to(tl.uint8), mask=place < size)


@triton.jit
def _kept(bits, token, first, tokens, width, TOKENS: tl.constexpr, INPUTS: tl.constexpr):
    """Load the dropout bits of a tile that begins at column `first`, as a boolean matrix."""
    byte = first // 8 + tl.arange(0, INPUTS // 8)
    inside = (token < tokens)[:, None] & (byte < width)[None, :]
    packed = tl.load(bits + token[:, None] * width + byte[None, :], mask=inside, other=0)
    each = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(each, (TOKENS, INPUTS)) != 0


@triton.jit(do_not_specialize=["tokens"])
def down_kernel(
    x, bits, weight, out, tokens, inputs, rank, scale,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute (x∘m) Aᵀ · scale, shape (T, R)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * RANK + tl.arange(0, RANK)
    width = (inputs + 7) // 8
    total = tl.zeros((TOKENS, RANK), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        column = first + tl.arange(0, INPUTS)
        inside = (token < tokens)[:, None] & (column < inputs)[None, :]
        values = tl.load(x + token[:, None] * inputs + column[None, :], mask=inside, other=0.0)
        kept = _kept(bits, token, first, tokens, width, TOKENS, INPUTS)
        values = tl.where(kept, values, 0.0)
        within = (column < inputs)[:, None] & (row < rank)[None, :]
        part = tl.load(weight + row[None, :] * inputs + column[:, None], mask=within, other=0.0)
        total = tl.dot(values, part, total, input_precision="ieee")
    found = (total * scale).to(out.dtype.element_ty)
    inside = (token < tokens)[:, None] & (row < rank)[None, :]
    tl.store(out + token[:, None] * rank + row[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def of_down_kernel(
    of_thin, x, bits, out, tokens, inputs, rank, scale,
    SPLIT: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute (of_thin)ᵀ (x∘m) · scale for one part of the tokens, float32, shape (splits,
    R, I).
    """
    first = tl.program_id(0) * INPUTS
    column = first + tl.arange(0, INPUTS)
    split = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * RANK + tl.arange(0, RANK)
    width = (inputs + 7) // 8
    total = tl.zeros((RANK, INPUTS), dtype=tl.float32)
    for start in range(0, SPLIT, TOKENS):
        token = split * SPLIT + start + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (column < inputs)[None, :]
        values = tl.load(x + token[:, None] * inputs + column[None, :], mask=inside, other=0.0)
        kept = _kept(bits, token, first, tokens, width, TOKENS, INPUTS)
        values = tl.where(kept, values, 0.0)
        within = (token < tokens)[None, :] & (row < rank)[:, None]
        part = tl.load(of_thin + token[None, :] * rank + row[:, None], mask=within, other=0.0)
        total = tl.dot(part, values, total, input_precision="ieee")
    inside = (row < rank)[:, None] & (column < inputs)[None, :]
    place = (split * rank + row)[:, None] * inputs + column[None, :]
    tl.store(out + place, total * scale, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def of_input_kernel(
    of_thin, weight, bits, out, tokens, inputs, rank, scale,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute (of_thin A)∘m · scale, shape (T, I)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * INPUTS
    column = first + tl.arange(0, INPUTS)
    total = tl.zeros((TOKENS, INPUTS), dtype=tl.float32)
    for start in range(0, rank, RANK):
        row = start + tl.arange(0, RANK)
        within = (token < tokens)[:, None] & (row < rank)[None, :]
        left = tl.load(of_thin + token[:, None] * rank + row[None, :], mask=within, other=0.0)
        within = (row < rank)[:, None] & (column < inputs)[None, :]
        right = tl.load(weight + row[:, None] * inputs + column[None, :], mask=within, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    kept = _kept(bits, token, first, tokens, (inputs + 7) // 8, TOKENS, INPUTS)
    found = tl.where(kept, total * scale, 0.0).to(out.dtype.element_ty)
    inside = (token < tokens)[:, None] & (column < inputs)[None, :]
    tl.store(out + token[:, None] * inputs + column[None, :], found, mask=inside)


def draw_bits(seed: Tensor, rows: int, columns: int, keep: float) -> Tensor:
    """Triton version of `adapter_bits.draw_bits`."""
    bits = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device=seed.device)
    size = bits.numel()
    with _on(seed):
        draw_kernel[(triton.cdiv(size, BYTES),)](seed, bits, size, round(65_536 * keep), BYTES)
    return bits


def kept_down(x: Tensor, bits: Tensor, down: Tensor, keep: float) -> Tensor:
    """Triton version of `adapter_bits.kept_down`."""
    (tokens, inputs), rank = x.shape, len(down)
    out = x.new_empty(tokens, rank)
    tile, block = tiles(x.dtype)["down_kernel"], ranks(rank)
    grid = triton.cdiv(tokens, tile["TOKENS"]), triton.cdiv(rank, block)
    numbers = (x.contiguous(), bits, down.contiguous(), out, tokens, inputs, rank, 1 / keep)
    with _on(x):
        down_kernel[grid](*numbers, **tile, RANK=block)
    return out


def kept_of_down(of_thin: Tensor, x: Tensor, bits: Tensor, keep: float, split: int) -> Tensor:
    """Triton version of `adapter_bits.kept_of_down`, in parts of `split` tokens."""
    (tokens, inputs), rank = x.shape, of_thin.shape[1]
    splits, block = max(1, triton.cdiv(tokens, split)), ranks(rank)
    out = x.new_empty(splits, rank, inputs, dtype=torch.float32)
    tile = tiles(x.dtype)["of_down_kernel"]
    grid = triton.cdiv(inputs, tile["INPUTS"]), splits, triton.cdiv(rank, block)
    numbers = (of_thin.contiguous(), x.contiguous(), bits, out, tokens, inputs, rank, 1 / keep)
    with _on(x):
        of_down_kernel[grid](*numbers, SPLIT=split, **tile, RANK=block)
    return out


def kept_of_input(of_thin: Tensor, down: Tensor, bits: Tensor, keep: float) -> Tensor:
    """Triton version of `adapter_bits.kept_of_input`."""
    tokens, (rank, inputs) = len(of_thin), down.shape
    out = of_thin.new_empty(tokens, inputs)
    tile, block = tiles(down.dtype)["of_input_kernel"], ranks(rank)
    grid = triton.cdiv(tokens, tile["TOKENS"]), triton.cdiv(inputs, tile["INPUTS"])
    numbers = (of_thin.contiguous(), down.contiguous(), bits, out, tokens, inputs, rank, 1 / keep)
    with _on(down):
        of_input_kernel[grid](*numbers, **tile, RANK=block)
    return out


def _on(tensor: Tensor) -> Any:
    """Return a context that makes the tensor's GPU current, because Triton launches kernels on the
    current device.
    """
    return torch.accelerator.device_index(tensor.device.index)

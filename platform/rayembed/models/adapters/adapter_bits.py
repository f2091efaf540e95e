"""Adapter dropout that stores one bit per input: reference implementations in torch of the
operations with these bits.

T tokens, I inputs, R rank; bits are uint8 (T, ceil(I / 8)), a byte has eight columns, the first one
lowest. On GPUs the operations are Triton's kernels (`adapter_kernels`), elsewhere torch's, by which
the kernels are checked.
"""

import logging
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rayembed.machine.hardware import say_once

SPLIT = 2048
"""Tokens over which a part of the gradient of A is summed."""

_LEVELS = 1 << 16
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Number types of the kernels, and by how much of the largest number a check may be off."""

_OWNED: Any = torch.library.Library("rayembed", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMAS = {
    "draw_bits": "(Tensor seed, int rows, int columns, float keep) -> Tensor",
    "kept_down": "(Tensor x, Tensor bits, Tensor down, float keep) -> Tensor",
    "kept_of_down": "(Tensor of_thin, Tensor x, Tensor bits, float keep) -> Tensor",
    "kept_of_input": "(Tensor of_thin, Tensor down, Tensor bits, float keep) -> Tensor",
}


def share_kept(dropout: float) -> float:
    """Round the share of values that dropout keeps to a multiple of 1/65,536, as each decision uses
    16 random bits.
    """
    return min(max(round(_LEVELS * (1 - dropout)), 1), _LEVELS - 1) / _LEVELS


def splits_of(tokens: int) -> int:
    """Number of parts in which A's gradient is summed; it depends on the token count alone, so that
    every GPU adds in the same order.
    """
    return max(1, -(-tokens // SPLIT))


def unpacked(bits: Tensor, columns: int) -> Tensor:
    """Unpack dropout bits to a boolean matrix (T, I)."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[:, :columns].bool()


def draw_bits(seed: Tensor, rows: int, columns: int, keep: float) -> Tensor:
    """Draw dropout bits for (T, I) values, each set with probability `keep`.

    Eight decisions are the 128 bits that Philox4x32 with ten rounds makes of the seed for the place
    of their byte (Salmon et al., 2011, doi:10.1145/2063384.2063405).

    Args:
        seed: one number of 64 bits.
        keep: a multiple of 1/65,536.
    """
    width = -(-columns // 8)
    place = torch.arange(rows * width, device=seed.device)
    numbers = torch.stack(_philox(place, seed), -1)  # of each byte four, of 32 bits
    halves = torch.stack([numbers & 0xFFFF, numbers >> 16], -1).flatten(-2)
    decided = (halves < round(_LEVELS * keep)).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=seed.device)
    return (decided * weights).sum(-1).to(torch.uint8).view(rows, width)


def _philox(place: Tensor, seed: Tensor) -> list[Tensor]:
    """Compute four 32-bit random numbers for each position with the Philox generator, as Triton
    does.
    """
    low = 0xFFFFFFFF
    first, second, third, fourth = place & low, place >> 32, place * 0, place * 0
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        (upper, lower), (above, below) = _product(0xCD9E8D57, third), _product(0xD2511F53, first)
        first, second, third, fourth = (
            upper ^ second ^ keys[0],
            lower,
            above ^ fourth ^ keys[1],
            below,
        )
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    return [first, second, third, fourth]


def _product(constant: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply 32-bit numbers held in signed int64, without overflow; return the upper and lower 32
    bits.
    """
    lower, upper = numbers & 0xFFFF, numbers >> 16
    middle = constant * upper + (constant * lower >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | constant * lower & 0xFFFF


def kept_down(x: Tensor, bits: Tensor, down: Tensor, keep: float) -> Tensor:
    """Compute (x∘m) Aᵀ / keep, shape (T, R): the adapter's first product with dropout mask m, in
    the dtype of x.
    """
    x, down, dtype = _wide(x), _wide(down), x.dtype
    return torch.mm(x * unpacked(bits, x.shape[1]), down.t()).div_(keep).to(dtype)


def kept_of_down(of_thin: Tensor, x: Tensor, bits: Tensor, keep: float) -> Tensor:
    """Compute A's gradient (of_thin)ᵀ (x∘m) / keep separately for each block of 2,048 tokens:
    (parts, R, I) float32.
    """
    x, of_thin = _wide(x) * unpacked(bits, x.shape[1]), _wide(of_thin)
    starts = (place * SPLIT for place in range(splits_of(len(x))))
    parts = [of_thin[at : at + SPLIT].t() @ x[at : at + SPLIT] for at in starts]
    return torch.stack(parts).div_(keep)


def kept_of_input(of_thin: Tensor, down: Tensor, bits: Tensor, keep: float) -> Tensor:
    """Gradient of an adapter with dropout with respect to its input: (of_thin A)∘m / keep, shape
    (T, I), in the dtype of A.
    """
    found = torch.mm(_wide(of_thin), _wide(down)).div_(keep)
    return found.mul_(unpacked(bits, down.shape[1])).to(down.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def kernels_work(device: torch.device, dtype: torch.dtype, rank: int) -> bool:
    """Whether Triton's kernels reproduce torch's results on this device; tested once per process,
    and logged if they do not.
    """
    reason = _why_not(device, dtype, rank)
    if reason is not None:
        say_once(
            logging.WARNING,
            f"adapters' dropout keeps its noise and a copy of its inputs: {reason}. It takes more "
            "memory and time so",
        )
    return reason is None


@lru_cache
def _why_not(device: torch.device, dtype: torch.dtype, rank: int) -> str | None:
    if dtype not in _TOLERANCES:
        return f"there are no kernels for {dtype}"
    try:
        # A compiler may ask, in whose modes nothing is computed.
        with _disable_current_modes(), torch.no_grad():
            apart = differences(device, dtype, rank)
    except Exception as error:  # noqa: BLE001 # of a compiler, a driver, a GPU: each of its own kind
        return f"Triton's kernels fail on {device} ({type(error).__name__}: {error})"
    wrong = {name: value for name, value in apart.items() if not value <= _TOLERANCES[dtype]}
    return f"Triton's kernels are wrong on {device}, by {wrong}" if wrong else None


def differences(device: torch.device, dtype: torch.dtype, rank: int) -> dict[str, float]:
    """Run each Triton kernel on test data and return its largest difference from torch's result,
    relative to the largest value.

    Numbers are the same each time, without any generator; sizes are no multiples of a tile's.
    """
    tokens, inputs, keep = SPLIT + 75, 203, 0.75

    def made(rows: int, columns: int) -> Tensor:
        count = torch.arange(rows * columns, dtype=torch.float32, device=device)
        return (count * 0.7).sin().view(rows, columns).to(dtype)

    x, down, of_thin = made(tokens, inputs), made(rank, inputs), made(tokens, rank)
    seed = torch.tensor([0x1234_5678_9ABC_DEF1], device=device)
    bits = draw_bits(seed, tokens, inputs, keep)
    given: dict[Any, tuple[Any, ...]] = {
        draw_bits: (seed, tokens, inputs, keep),
        kept_down: (x, bits, down, keep),
        kept_of_down: (of_thin, x, bits, keep),
        kept_of_input: (of_thin, down, bits, keep),
    }
    apart = {}
    for right, numbers in given.items():
        expected = right(*numbers).double()
        found = getattr(torch.ops.rayembed, right.__name__)(*numbers).double()
        apart[right.__name__] = float((found - expected).abs().max() / expected.abs().max())
    return apart


def _by_triton(name: str, *numbers: Any) -> Tensor:
    from rayembed.models.adapters import adapter_kernels

    if name == "kept_of_down":
        numbers = (*numbers, SPLIT)
    found: Tensor = getattr(adapter_kernels, name)(*numbers)
    return found


def _bits_shape(seed: Tensor, rows: int, columns: int, keep: float) -> Tensor:
    return seed.new_empty(rows, -(-columns // 8), dtype=torch.uint8)


def _down_shape(x: Tensor, bits: Tensor, down: Tensor, keep: float) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[0])


def _of_down_shape(of_thin: Tensor, x: Tensor, bits: Tensor, keep: float) -> Tensor:
    sizes = splits_of(x.shape[0]), of_thin.shape[1], x.shape[1]
    return x.new_empty(sizes, dtype=torch.promote_types(x.dtype, torch.float32))


def _of_input_shape(of_thin: Tensor, down: Tensor, bits: Tensor, keep: float) -> Tensor:
    return down.new_empty(of_thin.shape[0], down.shape[1])


for _by_torch, _shape in (
    (draw_bits, _bits_shape),
    (kept_down, _down_shape),
    (kept_of_down, _of_down_shape),
    (kept_of_input, _of_input_shape),
):
    _name = _by_torch.__name__
    _OWNED.define(_name + _SCHEMAS[_name])
    _OWNED.impl(_name, _by_torch, "CPU")
    _OWNED.impl(_name, partial(_by_triton, _name), "CUDA")
    torch.library.register_fake(f"rayembed::{_name}", _shape, lib=_OWNED)

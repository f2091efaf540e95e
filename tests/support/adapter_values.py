"""Values of an adapter's Triton kernels against torch's operations, over drawn shapes.

As a program it computes them on the CPU by Triton's interpreter: TRITON_INTERPRET=1. That one
takes bfloat16's numbers for whole ones in products, so they are left out there.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from rayembed.models.adapters import adapter_bits
from rayembed.models.adapters.adapter_bits import share_kept

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the largest number: once rounded to the type."""


def cases(number: int) -> Iterator[tuple[int, int, int, float, bool]]:
    """Tokens, inputs, rank, dropout, and whether tensors are laid out in another order."""
    draw = np.random.default_rng(45)
    yield from [(1, 1, 1, 0.5, False), (0, 24, 4, 0.1, False), (2100, 16, 3, 0.1, False)]
    for place in range(number):
        tokens, inputs, rank = (int(draw.integers(1, most)) for most in (90, 200, 90))
        yield tokens, inputs, rank, float(draw.choice([0.05, 0.1, 0.5, 0.99])), place % 2 > 0


def check(kernels: Any, device: str, number: int, dtypes: Iterable[torch.dtype]) -> None:
    """Compare all kernels."""
    for dtype in dtypes:
        tolerance = TOLERANCES[dtype]
        for tokens, inputs, rank, dropout, other_order in cases(number):
            draw = torch.Generator().manual_seed(tokens)

            def made(rows, columns, draw=draw, dtype=dtype, other_order=other_order):
                if other_order:
                    made = torch.randn(columns, rows, generator=draw).t()
                else:
                    made = torch.randn(rows, columns, generator=draw)
                return made.to(device, dtype)

            x, down, of_thin = made(tokens, inputs), made(rank, inputs), made(tokens, rank)
            seed = torch.empty(1, dtype=torch.int64).random_(generator=draw).to(device)
            keep = share_kept(dropout)
            bits = adapter_bits.draw_bits(seed, tokens, inputs, keep)
            assert torch.equal(kernels.draw_bits(seed, tokens, inputs, keep), bits)
            for name, given in {
                "kept_down": (x, bits, down, keep),
                "kept_of_down": (of_thin, x, bits, keep),
                "kept_of_input": (of_thin, down, bits, keep),
            }.items():
                parts = (adapter_bits.SPLIT,) if name == "kept_of_down" else ()
                found = getattr(kernels, name)(*given, *parts)
                expected = getattr(adapter_bits, name)(*given)
                again = getattr(kernels, name)(*given, *parts)
                assert found.dtype == expected.dtype, name
                assert found.shape == expected.shape, name
                assert torch.equal(found, again), f"{name} is not the same twice"
                if not expected.numel():
                    continue
                largest = expected.abs().max().clamp(min=1e-30)
                apart = float((found.double() - expected.double()).abs().max() / largest)
                assert apart <= tolerance, (name, dtype, tokens, inputs, rank, dropout, apart)


if __name__ == "__main__":
    from rayembed.models.adapters import adapter_kernels

    check(adapter_kernels, "cpu", 3, (torch.float32, torch.float16))

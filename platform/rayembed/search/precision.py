"""Products as exact as the search's bounds assume, whatever the process has set for its models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products without TF32 or bfloat16 inside, bfloat16 products summed in float32.

    By default cuBLAS may split the sum of a bfloat16 product, and then adds the parts in bfloat16.
    """
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]

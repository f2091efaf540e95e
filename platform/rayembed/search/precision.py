"""Products as exact as the search's bounds assume, whatever the process has set for its models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayembed.hardware import float32_products


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products without TF32 or bfloat16 inside, bfloat16 products summed in float32.

    By default cuBLAS may split the sum of a bfloat16 product, and then adds the parts in bfloat16.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with float32_products("highest"):
        matmul.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = before

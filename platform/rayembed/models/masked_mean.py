"""Mean over the tokens of a mask, accumulated in float32 for any dtype of the states."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_mean(
    hidden: Float[Tensor, "batch tokens hidden"], mask: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch hidden"]:
    """Mean of the states where the mask is true, float32; no row may be empty.

    Multiplying by 0 and 1 is exact in bfloat16, so only the sum needs float32.
    """
    kept = hidden * mask.unsqueeze(-1).to(hidden.dtype)
    sums = kept.sum(dim=1, dtype=torch.float32)
    return sums / mask.sum(dim=1, keepdim=True, dtype=torch.float32)

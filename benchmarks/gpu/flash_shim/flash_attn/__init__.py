"""flash-attn's functions over FlashAttention 2 as torch has it, where the package is not installed.

sentence-transformers runs without padding where transformers sees flash-attn. A benchmark puts this
folder on PYTHONPATH for sentence-transformers alone, so that both sides run the same kernel. The
version's ending tells it from the package.

B texts, T tokens of queries and K of keys, H heads, G key heads, D head width.
"""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

__version__ = "2.8.3+torch"

flash_attn_with_kvcache = None
"""For generation, which no embedding model does."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend within each text: (T, H, D) from queries (T, H, D) and keys and values (K, G, D).

    Raises:
        ValueError: for dropout, which torch's kernel does not have.
    """
    if dropout_p:
        raise ValueError(f"torch's unpadded attention has no dropout, and {dropout_p} is set")
    before, after = window_size
    return varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        scale=softmax_scale,
        window_size=(before, 0 if causal else after),
        enable_gqa=k.shape[1] != q.shape[1],
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend within texts of one length: (B, T, H, D) from (B, T, H, D) and (B, K, G, D)."""
    ends = [
        torch.arange(0, (len(x) + 1) * x.shape[1], x.shape[1], device=x.device, dtype=torch.int32)
        for x in (q, k)
    ]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    found = flash_attn_varlen_func(
        *flat, *ends, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size
    )
    return found.view(q.shape)

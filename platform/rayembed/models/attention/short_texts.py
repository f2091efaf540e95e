"""Attention by plain matrix products, fast for training on few short texts on CPUs, and attention
for packed texts.

SDPA's flash kernel for CPUs is slow in bf16 where texts are short: products in float32 took two
thirds to a third of its time, and their gradients lie nearer to those of float64
(benchmarks/attention_speed.py, benchmarks/log); attention dropout sends SDPA to a path that is
slower still. The products gain while the scores at hand stay in the processor's cache, so they go
by groups of texts; long texts go to SDPA.
"""

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from rayembed.models.attention.varlen import varlen_attention

NAME = "rayembed"
"""Name under which this attention is registered with transformers."""

_SCORES_OF_TEXT = 1 << 18
"""Maximum heads · length² of a text; longer texts use SDPA."""

_SCORES_OF_GROUP = 1 << 19
"""Scores computed in one product: 2 MiB in float32."""

_SCORES_KEPT = 1 << 24
"""Maximum scores of a layer over all texts, 64 MiB in float32: unlike SDPA's, the backward pass
needs them."""


def use_products(model: Any) -> None:
    """Make a transformers model use this module's `attention`, if its family lets attention be
    chosen.

    Families that ask for SDPA by its name (sparse attention of DeepSeek 3.2 and others) keep it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    asks_for_sdpa = '"sdpa"' in inspect.getsource(sys.modules[type(model).__module__])
    if model._can_set_attn_implementation() and not asks_for_sdpa:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention with the signature that transformers expects: (B, H, T, D) → (B, T,
    H, D).

    By products in float32 for short texts on CPUs while the module trains, by SDPA otherwise; both
    scale, mask and share key heads alike. A token that sees nothing gets the mean of all values
    from the products.

    With `cu_seq_lens_q` (see `packed`) B is 1, T the tokens of all texts, and each text attends to
    itself; the mask is not looked at.

    Raises:
        ValueError: packed texts with dropout or a bias, or without a kernel.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        return _unpadded(module, query, key, value, dropout, scaling, is_causal, **kwargs), None
    rows, heads, length, width = query.shape
    scores_of_text = heads * length * key.shape[2]
    by_products = (
        module.training
        and query.device.type == "cpu"
        and length == key.shape[2]
        and 0 < scores_of_text <= _SCORES_OF_TEXT
        and 0 < rows * scores_of_text <= _SCORES_KEPT
        and (attention_mask is None or attention_mask.dim() == 4)
        and kwargs.get("position_bias") is None
    )
    if not by_products:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        with _kernels_with_dropout() if dropout else nullcontext():
            attended: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
            )
        return attended
    shared = heads // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    bias = _bias(module, query, attention_mask, is_causal)
    scale = width**-0.5 if scaling is None else scaling
    group = _SCORES_OF_GROUP // scores_of_text
    outputs = []
    for first in range(0, rows, group):
        texts = slice(first, first + group)
        scores = (query[texts].float() * scale) @ key[texts].float().transpose(-1, -2)
        if bias is not None:
            scores = scores + (bias[texts] if len(bias) > 1 else bias)
        weights = functional.dropout(scores.softmax(dim=-1), dropout)
        outputs.append((weights @ value[texts].float()).to(value.dtype).transpose(1, 2))
    return torch.cat(outputs), None


def _kernels_with_dropout() -> AbstractContextManager[None]:
    """Return a context in which SDPA avoids a replaced flash kernel, which would fail on
    dropout.

    The others raise an error at any dropout, of which SDPA knows nothing when it chooses.
    """
    if current_flash_attention_impl() is None:
        return nullcontext()
    others = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(others)


def _bias(
    module: torch.nn.Module, query: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """Convert a mask or causality to a float32 bias for attention scores, (B or 1, heads or 1, T or
    1, T); None if nothing is masked.
    """
    lowest = torch.finfo(torch.float32).min  # not -inf: a row may have nothing to attend to
    length = query.shape[2]
    if mask is None:
        if not _causal(module, is_causal) or length == 1:
            return None
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
    if mask.dtype != torch.bool:
        return mask.float().clamp(min=lowest)
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, lowest)


def _unpadded(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute attention within each packed text; returns (1, T, H, D)."""
    if dropout or position_bias is not None:
        raise ValueError("attention of packed texts supports neither dropout nor a bias")
    attended: Tensor = varlen_attention(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_k,
        (max_length_q, max_length_k),
        causal=_causal(module, is_causal),
        window=sliding_window,
        scale=scaling,
    )
    return attended.unsqueeze(0)


def _causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a layer's attention is causal: the call's argument decides, else the layer's
    attribute.
    """
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

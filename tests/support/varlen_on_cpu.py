"""The operator of torch's attention within packed texts computes on a CPU, as a GPU's does."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rayembed.models.attention import unpadded, varlen

_reference = varlen.reference


def _forward(query, key, value, cu_queries, cu_keys, most, most_keys, causal, scale, window, *_):
    """Outputs, logarithms of sums (zeros, which the backward pass here needs not) and seeds."""
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert causal == (list(window) == [-1, 0])
    ends = (cu_queries, cu_keys, (most, most_keys))
    attended = _reference(query, key, value, *ends, tuple(window), scale)
    sums = torch.zeros(query.shape[1], len(query))
    return attended.contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad, query, key, value, out, sums, cu_queries, cu_keys, most, most_keys, causal, seed,
    scale=None, window=None,
):  # fmt: skip
    """Gradients of queries, keys and values, text by text in float32."""
    shared = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    texts = zip(pairwise(cu_queries.tolist()), pairwise(cu_keys.tolist()), strict=True)
    for own, other in texts:
        q, do = (x[slice(*own)].float().transpose(0, 1) for x in (query, grad))
        k, v = (
            x[slice(*other)].float().repeat_interleave(shared, 1).transpose(0, 1)
            for x in (key, value)
        )
        hidden = varlen._hidden(q.shape[1], k.shape[1], tuple(window), q.device)
        weights = (q @ k.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        of_weights = do @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        found = (of_scores @ k, of_scores.mT @ q, weights.mT @ do)
        for total, one, rows in zip(grads, found, (own, other, other), strict=True):
            heads = total.shape[1]
            total[slice(*rows)] = one.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    return tuple(x.to(y.dtype) for x, y in zip(grads, (query, key, value), strict=True))


@contextmanager
def varlen_on_cpu(
    patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), *, tried: bool = False
) -> Iterator[None]:
    """Within, packed texts on a CPU go the way that they go on a GPU of the capability.

    Args:
        tried: whether models are tried before they pack.
    """
    properties = SimpleNamespace(major=capability[0], minor=capability[1])

    def kernel(*given) -> Tensor:
        return varlen._kernel(*given)

    with torch.library._scoped_library("torch_attn", "IMPL") as library, patch.context() as within:
        library.impl("_varlen_attn", _forward, "CPU")
        library.impl("_varlen_attn_backward", _backward, "CPU")
        within.setattr(torch.cuda, "get_device_properties", lambda _=None: properties)
        within.setattr(varlen, "reference", kernel)
        if not tried:
            within.setattr(unpadded, "_why_padded", lambda _: None)
        yield

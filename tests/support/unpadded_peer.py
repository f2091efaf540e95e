"""sentence-transformers without padding on a CPU, where a reference stands for the kernel.

Run with benchmarks/gpu/flash_shim on PYTHONPATH: python unpadded_peer.py FOLDER
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.attention import varlen as kernels

torch.set_num_threads(1)
torch.cuda.is_available = lambda: True  # else transformers takes no flash-attn

from benchmarks.gpu import training  # noqa: E402

from rayembed.models.attention import varlen  # noqa: E402

CALLS = []


def reference(query, key, value, cu_queries, cu_keys, most, most_keys, scale, sides):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    longest = (most, most_keys)
    return varlen.reference(query, key, value, cu_queries, cu_keys, longest, tuple(sides), scale)


@kernels._varlen_attn.register_kernel("cpu")
def forward(
    query, key, value, cu_q, cu_k, most_q, most_k, causal=False, scale=None, window=None, *_, **__
):
    CALLS.append((tuple(query.shape), len(cu_q) - 1, tuple(window)))
    out = reference(query, key, value, cu_q, cu_k, most_q, most_k, scale, window)
    rest = torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)
    return out.contiguous().clone(), *rest


@kernels._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad, query, key, value, out, lse, cu_q, cu_k, most_q, most_k, causal, state, scale, window, *_
):
    def gradients():
        own = [x.detach().requires_grad_() for x in (query, key, value)]
        found = reference(*own, cu_q, cu_k, most_q, most_k, scale, window)
        return torch.autograd.grad(found, own, grad)

    # An operator's kernel runs below autograd, another thread does not.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(gradients).result()


training.main(
    ["--toy", "--models", "bert", "7b", "--sides", "peer", "--steps", "1", "--folder", sys.argv[1]]
)
sys.stdout.write(f"packed calls {len(CALLS)}, windows {sorted({call[2] for call in CALLS})}\n")

"""Attention in training on CPUs: products over groups of short texts against SDPA, in one run.

Forward and backward pass in bfloat16, best of several rounds in turn, and how far the gradients lie
from those in float64. Run: python benchmarks/attention_speed.py
"""

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

SHAPES = [(8, 12, 128, 32), (32, 12, 128, 32), (32, 12, 32, 32), (32, 9, 64, 64)]
SHAPES += [(4, 12, 256, 64), (8, 32, 128, 128)]
"""Texts, heads, tokens, width of a head. The last two are above the limit: SDPA on both sides."""
ROUNDS = 7


def products(query, key, value):
    from rayembed.models.attention.short_texts import attention

    return attention(LAYER, query, key, value, None)[0].transpose(1, 2)


def sdpa(query, key, value):
    return scaled_dot_product_attention(query, key, value)


LAYER = torch.nn.Identity().train()
LAYER.is_causal = False


def timed(attend, inputs, weights):
    began = time.perf_counter()
    gradients = torch.autograd.grad(attend(*inputs), inputs, weights)
    return 1e3 * (time.perf_counter() - began), gradients


def main():
    print("| texts × heads × tokens × width | SDPA, ms | products, ms | errors of gradients |")
    print("|---|---|---|---|")
    for texts, heads, tokens, width in SHAPES:
        torch.manual_seed(0)
        # As a model makes them: heads beside one another.
        made = torch.randn(4, texts, tokens, heads, width).transpose(2, 3).bfloat16()
        *inputs, weights = (x.requires_grad_(i < 3) for i, x in enumerate(made.unbind()))
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        _, exact = timed(sdpa, doubles, weights.double())
        best, errors = {}, {}
        for _ in range(ROUNDS):
            for side in (sdpa, products):
                took, found = timed(side, inputs, weights)
                best[side] = min(took, best.get(side, took))
                pairs = zip(found, exact, strict=True)
                errors[side] = max(float((g - e).norm() / e.norm()) for g, e in pairs)
        print(
            f"| {texts} × {heads} × {tokens} × {width} | {best[sdpa]:.1f} | {best[products]:.1f} "
            f"| {errors[sdpa]:.1e}, {errors[products]:.1e} |"
        )


if __name__ == "__main__":
    main()

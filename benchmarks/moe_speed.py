"""A mixture of experts against a dense MLP at equal active parameters: time of a training pass.

    python benchmarks/moe_speed.py [--device cuda] [--hidden 768] [--tokens 4096]

The dense MLP is as wide as the experts of one token together (k · F), so that both multiply the
same numbers. Sides alternate within one process, and the ratio of their medians counts.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from rayembed.models.experts import MoeMlp, has_grouped_kernel


class Dense(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def seconds(layer: nn.Module, x: Tensor, grad: Tensor) -> float:
    layer.zero_grad(set_to_none=True)
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    ones = torch.ones(len(x), device=x.device)
    made = layer(x, ones).output if isinstance(layer, MoeMlp) else layer(x)
    made.backward(grad)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    for top_k in (1, 2):
        inner = 4 * args.hidden
        mixture = MoeMlp(args.hidden, inner, args.experts, top_k, hidden_bias=False)
        with torch.no_grad():
            for parameter in mixture.parameters():
                parameter.normal_(std=0.02)
        dense = Dense(args.hidden, top_k * inner)
        layers = {"moe": mixture, "dense": dense}
        for layer in layers.values():
            layer.to(args.device, dtype)
        x = torch.randn(args.tokens, args.hidden, device=args.device, dtype=dtype)
        x.requires_grad_()
        grad = torch.randn_like(x)
        found: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(args.repeats):
            for name, layer in layers.items():
                found[name].append(seconds(layer, x, grad))
        median = {name: statistics.median(times[2:]) for name, times in found.items()}
        way = "grouped" if has_grouped_kernel(mixture.experts.mlp.w1, args.experts) else "loop"
        print(
            f"top-{top_k} of {args.experts} ({way}), {args.tokens} tokens, width {args.hidden}, "
            f"{args.dtype} on {args.device}: moe {1e3 * median['moe']:.1f} ms, dense "
            f"{1e3 * median['dense']:.1f} ms, ratio {median['moe'] / median['dense']:.2f}"
        )


if __name__ == "__main__":
    main()

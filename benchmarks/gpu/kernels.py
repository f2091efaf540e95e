"""Kernels of training one by one: products, attention by every path, latents, element-wise work.

Attention is timed over texts of different lengths (those of retrieval data), since padding is what
the paths differ in: padded with a mask, padded without one as an upper bound, and packed. Each path
is first compared with plain softmax in float32.
Run: python -m benchmarks.gpu.kernels [--toy]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.gpu.lengths import ONLY_RETRIEVAL, rows_of_lengths
from benchmarks.gpu.measuring import (
    arguments,
    check,
    device_of,
    has_flash_attention,
    machine_line,
    print_table,
    product_flops,
    seconds,
)
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer."""

    query: int
    key: int
    width: int


MISTRAL, BERT, TOY = Heads(32, 8, 128), Heads(12, 12, 64), Heads(4, 2, 16)


@dataclass(frozen=True)
class Texts:
    """Queries, keys and values of packed texts, (tokens, heads, width)."""

    lengths: list[int]
    parts: tuple[Tensor, Tensor, Tensor]

    @property
    def edges(self) -> list[int]:
        """Where each text begins, and the end of the last."""
        return [0, *np.cumsum(self.lengths).tolist()]

    def padded(self) -> tuple[list[Tensor], Tensor]:
        """Inputs as (texts, heads, longest, width), and which tokens are there."""
        made = [
            nn.utils.rnn.pad_sequence(torch.split(x, self.lengths), batch_first=True)
            for x in self.parts
        ]
        there = torch.arange(max(self.lengths), device=made[0].device)
        mask = there < torch.tensor(self.lengths, device=made[0].device)[:, None]
        return [x.transpose(1, 2) for x in made], mask


def made_texts(tokens: int, heads: Heads, device: torch.device, dtype: torch.dtype) -> Texts:
    """Texts of about so many tokens together."""
    drawn = rows_of_lengths(ONLY_RETRIEVAL, 1 + tokens // 100, 0).ravel()
    kept = drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), tokens)))].tolist()
    torch.manual_seed(0)
    parts = (
        torch.randn(sum(kept), number, heads.width).to(device, dtype)
        for number in (heads.query, heads.key, heads.key)
    )
    return Texts(kept, tuple(x.requires_grad_() for x in parts))


def exact(texts: Texts) -> Tensor:
    """Attention of each text by itself in float32, (tokens, heads, width)."""
    found = []
    for query, key, value in zip(
        *(torch.split(x.float(), texts.lengths) for x in texts.parts), strict=True
    ):
        shared = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(shared, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(found)


def packed(padded: Tensor, mask: Tensor) -> Tensor:
    """(texts, heads, longest, width) → (tokens, heads, width)."""
    return padded.transpose(1, 2)[mask]


def paths(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[Texts], Tensor]]:
    """Ways to attend that this machine has, each giving (tokens, heads, width)."""

    def with_mask(texts: Texts) -> Tensor:
        (query, key, value), mask = texts.padded()
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, mask[:, None, None])
        return packed(found, mask)

    def one_by_one(texts: Texts) -> Tensor:
        found = [
            functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in parts), enable_gqa=True
            )[0].transpose(0, 1)
            for parts in zip(*(torch.split(x, texts.lengths) for x in texts.parts), strict=True)
        ]
        return torch.cat(found)

    found = {"SDPA, padded with a mask": with_mask, "SDPA, text by text": one_by_one}
    if device.type == "cuda" and dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        def varlen(texts: Texts) -> Tensor:
            edges = torch.tensor(texts.edges, dtype=torch.int32, device=device)
            longest = max(texts.lengths)
            return varlen_attn(*texts.parts, edges, edges, longest, longest, enable_gqa=True)

        found["torch.nn.attention.varlen, packed"] = varlen
        if has_flash_attention():
            from flash_attn import flash_attn_varlen_func

            def flash(texts: Texts) -> Tensor:
                edges = torch.tensor(texts.edges, dtype=torch.int32, device=device)
                longest = max(texts.lengths)
                return flash_attn_varlen_func(*texts.parts, edges, edges, longest, longest)

            found["flash-attn, packed"] = flash
    return found


def attention_rows(device, dtype, heads: Heads, tokens: int, rounds: int) -> list[list[object]]:
    texts = made_texts(tokens, heads, device, dtype)
    reference = exact(texts).detach()
    weights = torch.randn_like(reference).to(dtype)
    useful = 4 * heads.query * heads.width * sum(n * n for n in texts.lengths)
    rows = []
    for name, attend in paths(device, dtype).items():
        apart = float((attend(texts).detach().float() - reference).abs().max())
        # Rounding of bfloat16 to 8 bits, of values up to about 4.
        check(apart < (0.05 if dtype != torch.float32 else 1e-4), f"{name}: {apart:.0e} from exact")

        def both(attend=attend):
            return torch.autograd.grad(attend(texts), texts.parts, weights)

        with torch.no_grad():
            forward = seconds(lambda attend=attend: attend(texts), device, warmup=2, rounds=rounds)
        whole = seconds(both, device, warmup=2, rounds=rounds)
        rows.append(
            [
                f"{name}, {heads.query}/{heads.key} × {heads.width}",
                f"{1e3 * forward:.2f}",
                f"{1e3 * (whole - forward):.2f}",
                f"{useful / forward / 1e12:.3g}",
                f"{2.5 * useful / max(whole - forward, 1e-9) / 1e12:.3g}",
            ]
        )
    return rows


def module_rows(device, dtype, width: int, tokens: int, rounds: int) -> list[list[object]]:
    """Rayembed's latent attention, and a layer's element-wise work eager and compiled."""
    from rayembed.config.backbone import LatentAttentionPooling
    from rayembed.models.nvembed.pooling import build_latent_attention

    config = LatentAttentionPooling(num_latents=512 if width > 1000 else 16, num_heads=8)
    latent = build_latent_attention(config, width).to(device, dtype)
    hidden = torch.randn(8, tokens // 8, width).to(device, dtype).requires_grad_()
    mask = torch.ones(8, tokens // 8, dtype=torch.int64, device=device)
    reference = latent.float()(hidden.float(), mask, mask).detach()
    latent.to(dtype)
    found = latent(hidden, mask, mask).detach()
    apart = float((found - reference).abs().max() / reference.abs().max())
    check(apart < (0.02 if dtype != torch.float32 else 1e-4), f"latent attention: {apart:.0e}")

    def norm_and_gate(x: Tensor, scale: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return functional.silu(normed * scale) * x

    scale = torch.ones(width, device=device, dtype=dtype)
    works = {
        "latent attention": lambda: latent(hidden, mask, mask),
        "RMSNorm, SiLU and product, eager": lambda: norm_and_gate(hidden, scale),
    }
    if device.type == "cuda":  # a CPU would first compile C++
        compiled = torch.compile(norm_and_gate, dynamic=True)
        eager = norm_and_gate(hidden, scale).detach()
        apart = float((compiled(hidden, scale).detach() - eager).abs().max() / eager.abs().max())
        check(apart < 0.02, f"compiled: {apart:.0e} from eager")
        works["RMSNorm, SiLU and product, compiled"] = lambda: compiled(hidden, scale)
    rows = []
    for name, work in works.items():
        with torch.no_grad():
            forward = seconds(work, device, warmup=2, rounds=rounds)
        both = seconds(lambda work=work: work().sum().backward(), device, warmup=2, rounds=rounds)
        rows.append([name, f"{1e3 * forward:.2f}", f"{1e3 * (both - forward):.2f}", "", ""])
    return rows


def copy_row(device: torch.device, count: int) -> list[object]:
    """Bytes read and written each second by a copy on the device."""
    source = torch.empty(count, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    taken = seconds(lambda: target.copy_(source), device, warmup=2, rounds=5)
    return [f"{count / 1e9:.3g} GB", "", f"{2 * count / taken / 1e12:.3g}"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(given: list[str] | None = None) -> None:
    from rayembed.models.attention.varlen import settled_kernel

    options = arguments(__doc__).parse_args(given)
    device = device_of(options.toy)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    small = device.type == "cpu"
    rounds = options.rounds or (1 if small else 10)
    print(f"{machine_line(device)}\nunpadded attention: {settled_kernel(device)}")
    sizes = [256] if small else [4096, 8192]
    types = [torch.float32] if small else [torch.bfloat16, torch.float16, torch.float32]
    rows = [
        [f"{size}³", _name(kind), f"{product_flops(device, kind, size) / 1e12:.3g}"]
        for size in sizes
        for kind in types
    ]
    print_table(["product", "type", "TFLOP/s"], rows)
    print_table(["copy", "", "TB/s"], [copy_row(device, 1 << (20 if small else 32))])
    tokens = 600 if small else 16_384
    rows = []
    for heads in (TOY,) if small else (MISTRAL, BERT):
        rows += attention_rows(device, dtype, heads, tokens, rounds)
    rows += module_rows(device, dtype, 64 if small else 4096, tokens, rounds)
    heads = ["kernel", "forward, ms", "backward, ms", "TFLOP/s forward", "backward"]
    print(f"\n{tokens:,} tokens, {_name(dtype)}; of attention only what lies within texts counts\n")
    print_table(heads, rows)


if __name__ == "__main__":
    main()

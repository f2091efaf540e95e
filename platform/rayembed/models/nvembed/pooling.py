"""Pooling layers with weights, such as latent attention (arXiv 2405.17428, section 3.2).

There each token attends to a trained array of latents. It has two forms: that of the released
checkpoints, whose parameter names these modules have, and that of the paper's equations taken
literally. H hidden size, N tokens, R latents.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.backbone import LatentAttentionPooling, SelfAttentionPooling
from rayembed.errors import ConfigError
from rayembed.models import pooling
from rayembed.models.attention.packed import Packed
from rayembed.models.attention.varlen import varlen_attention
from rayembed.models.nvembed.config import NVEmbedPooling
from rayembed.models.pooling import Layout, Pooled, PoolMask, States, masked_mean

OUTPUT_STD = 1e-3
"""Standard deviation of the initial output projections in residual branches.

The branches then add about 1 % of the residual, so that training starts from mean pooling over
the pretrained hidden states instead of from noise, and yet gradients reach what lies before the
projections from the first step on, which zeros would keep from it.
"""


_WIDEST_OF_SDPA = 256
"""Maximum head width of SDPA's flash and cuDNN kernels; NV-Embed's heads are 4,096 wide."""


class LatentAttention(nn.Module):
    """Latent attention as in the released code: pre-norms, separate key and value projections,
    residuals, GEGLU MLP.
    """

    def __init__(
        self, hidden_size: int, *, num_latents: int, num_heads: int, head_dim: int, mlp_ratio: int
    ) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, hidden_size))
        attention = CrossAttention(hidden_size, num_heads, head_dim)
        self.cross_attend_blocks = nn.ModuleList(
            [
                PreNorm(hidden_size, attention, with_context=True),
                PreNorm(hidden_size, GegluMlp(hidden_size, mlp_ratio)),
            ]
        )

    def forward(self, hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
        """Return the masked mean over tokens, float32, not normalised."""
        # A token attends to latents only, never to tokens: all of a batch are one row of
        # queries, and the latents' keys and values are made once, not once a text.
        tokens = hidden.reshape(-1, hidden.shape[-1])
        attend, mlp = self.cross_attend_blocks
        tokens = attend(tokens, self.latents) + tokens
        tokens = mlp(tokens) + tokens
        return masked_mean(tokens.view_as(hidden), pool_mask, layout)


class PreNorm(nn.Module):
    """A layer with layer norms before it: of its input and, for cross-attention, of its context."""

    def __init__(self, hidden_size: int, fn: nn.Module, *, with_context: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.norm_context = nn.LayerNorm(hidden_size) if with_context else None
        self.fn = fn

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the layer's output, (N, H); the caller adds the residual."""
        if self.norm_context is None or context is None:
            output: Tensor = self.fn(self.norm(x))
        else:
            output = self.fn(self.norm(x), self.norm_context(context))
        return output


class CrossAttention(nn.Module):
    """Multi-head attention from tokens to a context; the first half of the shared projection gives
    keys, the second values.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads = num_heads
        self.to_q = nn.Linear(hidden_size, inner, bias=False)
        self.to_kv = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, hidden_size, bias=False)
        nn.init.normal_(self.to_out.weight, std=OUTPUT_STD)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], context: Float[Tensor, "latents hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the attention output of each token."""
        keys, values = self.to_kv(context).chunk(2, dim=-1)
        attended = _attend(
            _heads(self.to_q(x), self.num_heads),
            _heads(keys, self.num_heads),
            _heads(values, self.num_heads),
        )
        projected: Tensor = self.to_out(_joined(attended))
        return projected


class GegluMlp(nn.Module):
    """MLP `(a · gelu(g)) W2 + b2` where W1 gives `[a | g]`; gelu is exact, not approximated."""

    def __init__(self, hidden_size: int, mlp_ratio: int) -> None:
        super().__init__()
        inner = mlp_ratio * hidden_size
        out = nn.Linear(inner, hidden_size)
        nn.init.normal_(out.weight, std=OUTPUT_STD)
        nn.init.zeros_(out.bias)
        self.net = nn.Sequential(nn.Linear(hidden_size, 2 * inner), Geglu(), out)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, shaped as `x`."""
        output: Tensor = self.net(x)
        return output


class Geglu(nn.Module):
    """Gated activation: the first half of the features times gelu of the second half."""

    def forward(self, x: Tensor) -> Tensor:
        """Halve the features: (…, 2 F) → (…, F)."""
        values, gates = x.chunk(2, dim=-1)
        return values * functional.gelu(gates)


class PaperLatentAttention(nn.Module):
    """Latent attention as in the paper's equation 1: softmax(Q Kᵀ) V with K = V = latents, then a
    GELU MLP and the mean over tokens.

    Heads split the hidden size. There is neither a scale, a projection, a norm nor a residual,
    as the equation has none; without a residual what is left of a token is what latents hold.
    """

    def __init__(
        self, hidden_size: int, *, num_latents: int, num_heads: int, mlp_ratio: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latents = nn.Parameter(torch.randn(num_latents, hidden_size))
        inner = mlp_ratio * hidden_size
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, inner), nn.GELU(), nn.Linear(inner, hidden_size)
        )

    def forward(self, hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
        """Return the masked mean over tokens, float32, not normalised."""
        latents = _heads(self.latents, self.num_heads)
        queries = _heads(hidden.reshape(-1, hidden.shape[-1]), self.num_heads)
        attended = _attend(queries, latents, latents, scale=1.0)
        return masked_mean(self.mlp(_joined(attended)).view_as(hidden), pool_mask, layout)


class SelfAttention(nn.Module):
    """Pooling by one pre-norm block of self-attention and GELU MLP over the tokens, then their
    mean.

    The alternative of NV-Embed's Tables 2 and 3, of which only the outline is published. Tokens
    attend to all that is not padding, instruction included; the mean leaves the instruction out.
    """

    def __init__(self, hidden_size: int, *, num_heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.to_qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        inner = mlp_ratio * hidden_size
        out = nn.Linear(inner, hidden_size)
        nn.init.zeros_(out.bias)
        for projection in (self.to_out, out):
            nn.init.normal_(projection.weight, std=OUTPUT_STD)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, inner), nn.GELU(), out)

    def forward(self, hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
        """Return the mean over tokens after the block, float32."""
        normed = self.attention_norm(hidden)
        if isinstance(layout, Packed):
            attended = self._within_texts(normed, layout)
        else:
            attended = self._attended(normed, layout)
        hidden = hidden + self.to_out(attended)
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return masked_mean(hidden, pool_mask, layout)

    def _attended(self, normed: Tensor, mask: Tensor) -> Tensor:
        """Self-attention of padded texts: (B, T, H)."""
        batch, tokens, _ = normed.shape
        qkv = self.to_qkv(normed).view(batch, tokens, 3, self.num_heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask.bool()[:, None, None, :]
        )
        return attended.transpose(1, 2).reshape(batch, tokens, -1)

    def _within_texts(self, normed: Tensor, packed: Packed) -> Tensor:
        """Self-attention within packed texts: (T, H)."""
        qkv = self.to_qkv(normed).view(len(normed), 3, self.num_heads, -1)
        queries, keys, values = qkv.unbind(1)
        ends, longest = packed.cu_seqlens, (packed.longest, packed.longest)
        return varlen_attention(queries, keys, values, ends, ends, longest).flatten(1)


def build_pooling(config: NVEmbedPooling, hidden_size: int) -> nn.Module:
    """Build the pooling layer from its settings; it maps `(hidden, layout, pool_mask)` to (B, H)
    float32.

    Raises:
        ConfigError: heads that do not fit the hidden size.
    """
    match config:
        case LatentAttentionPooling():
            return build_latent_attention(config, hidden_size)
        case SelfAttentionPooling():
            check_heads(hidden_size, config.num_heads)
            return SelfAttention(
                hidden_size, num_heads=config.num_heads, mlp_ratio=config.mlp_ratio
            )
        case _:
            return pooling.build_pooling(config)


def build_latent_attention(config: LatentAttentionPooling, hidden_size: int) -> nn.Module:
    """Build the latent-attention layer in the form that the settings name, with initial
    weights.

    Raises:
        ConfigError: a number of heads or a head width that the form cannot have.
    """
    if config.form == "released":
        return LatentAttention(
            hidden_size,
            num_latents=config.num_latents,
            num_heads=config.num_heads,
            head_dim=config.head_dim or hidden_size,
            mlp_ratio=config.mlp_ratio,
        )
    check_heads(hidden_size, config.num_heads)
    if config.head_dim not in (None, hidden_size // config.num_heads):
        raise ConfigError(
            f"model.pooling.head_dim={config.head_dim} does not fit pooling as in the paper, whose "
            f"{config.num_heads} heads split the hidden size {hidden_size}: set head_dim to null"
        )
    return PaperLatentAttention(
        hidden_size,
        num_latents=config.num_latents,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
    )


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raise ConfigError if the number of heads does not divide the hidden size."""
    if hidden_size % num_heads:
        allowed = [n for n in range(1, 33) if hidden_size % n == 0]
        raise ConfigError(
            f"model.pooling.num_heads is {num_heads}, which does not divide the backbone's hidden "
            f"size {hidden_size}; allowed: {allowed}"
        )


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None) -> Tensor:
    """Attend from all tokens to the latents (1, heads, R, E) without a mask; returns (1, heads, N,
    E).

    On CUDA heads wider than any fast kernel of SDPA takes go by plain products: all tokens share
    the latents, so these are two large matrix products and a softmax, in float32, between them.
    """
    if queries.device.type == "cuda" and queries.shape[-1] > _WIDEST_OF_SDPA:
        return attend_by_products(queries, keys, values, scale=scale)
    return functional.scaled_dot_product_attention(queries, keys, values, scale=scale)


def attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None
) -> Tensor:
    """Compute attention without a mask by plain matrix products: (1, heads, N, E) in the dtype of
    the queries.
    """
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = (queries * scale) @ keys.transpose(-1, -2)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(values.dtype) @ values


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Split features into heads: (N, heads · E) → (1, heads, N, E)."""
    return x.view(1, x.shape[0], num_heads, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """Concatenate the heads: (1, heads, N, E) → (N, heads · E)."""
    return x.transpose(1, 2).reshape(x.shape[2], -1)

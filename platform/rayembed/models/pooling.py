"""Pooling: one float32 vector for each text from hidden states, not normalised."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.model import BiEncoderConfig, NVEmbedConfig, ProjectionConfig
from rayembed.config.pooling import (
    ClsPooling,
    EosPooling,
    LatentAttentionPooling,
    MaxPooling,
    MeanPooling,
    SelfAttentionPooling,
    WeightedMeanPooling,
)
from rayembed.models.latent_attention import OUTPUT_STD, build_latent_attention, check_heads
from rayembed.models.masked_mean import masked_mean

PoolingConfig = (
    MeanPooling
    | ClsPooling
    | EosPooling
    | MaxPooling
    | WeightedMeanPooling
    | LatentAttentionPooling
    | SelfAttentionPooling
)

_ACTIVATIONS = {"identity": nn.Identity, "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


class Mean(nn.Module):
    """Mean of the states of the tokens in the pool."""

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch hidden"]:
        """Mean over tokens, float32."""
        return masked_mean(hidden, pool_mask)


class Cls(nn.Module):
    """State of the first token."""

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch hidden"]:
        """The first state, float32."""
        return hidden[:, 0].float()


class Eos(nn.Module):
    """State of the last token that is not padding (padding goes right)."""

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch hidden"]:
        """The last state, float32."""
        last = attention_mask.sum(dim=1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last].float()


class Max(nn.Module):
    """Largest state of the tokens in the pool, dimension by dimension."""

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch hidden"]:
        """Maximum over tokens, float32."""
        return hidden.float().masked_fill(~pool_mask[..., None], float("-inf")).amax(dim=1)


class WeightedMean(nn.Module):
    """Mean of the states of the tokens in the pool, weighted by position (padding goes right)."""

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch hidden"]:
        """Weighted mean over tokens, float32; the weights are 1, 2, 3, ..."""
        positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
        weights = (pool_mask * positions).float()
        weights = weights / weights.sum(dim=1, keepdim=True)
        return torch.einsum("bth,bt->bh", hidden.float(), weights)


class Projection(nn.Module):
    """A linear layer and an activation on pooled vectors."""

    def __init__(self, in_width: int, config: ProjectionConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(in_width, config.width, bias=config.bias)
        self.activation = _ACTIVATIONS[config.activation]()

    def forward(self, vectors: Float[Tensor, "batch width"]) -> Float[Tensor, "batch out"]:
        """Vectors of the layer's width and dtype."""
        projected: Tensor = self.activation(self.linear(vectors.to(self.linear.weight.dtype)))
        return projected


class ProjectedPooling(nn.Module):
    """A pooling layer followed by projections."""

    def __init__(
        self, pooling: nn.Module, in_width: int, configs: Sequence[ProjectionConfig]
    ) -> None:
        super().__init__()
        self.pooling = pooling
        widths = [in_width, *(config.width for config in configs)]
        self.projections = nn.ModuleList(
            Projection(width, config) for width, config in zip(widths, configs, strict=False)
        )

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch out"]:
        """Output of the last projection, float32."""
        vectors: Tensor = self.pooling(hidden, attention_mask, pool_mask)
        for projection in self.projections:
            vectors = projection(vectors)
        return vectors.float()


class SelfAttention(nn.Module):
    """One pre-norm block of self-attention and GELU MLP over the tokens, then their mean.

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

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        attention_mask: Tensor,
        pool_mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch hidden"]:
        """Mean over tokens after the block, float32."""
        batch, tokens, _ = hidden.shape
        qkv = self.to_qkv(self.attention_norm(hidden)).view(batch, tokens, 3, self.num_heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=attention_mask.bool()[:, None, None, :]
        )
        hidden = hidden + self.to_out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return masked_mean(hidden, pool_mask)


def build_head(config: NVEmbedConfig | BiEncoderConfig, hidden_size: int) -> nn.Module:
    """Build the pooling layer of a model with its projections; (B, D) float32 output.

    D is the width of the last projection, without projections the hidden size.

    Raises:
        ConfigError: heads that do not fit the hidden size.
    """
    pooling = build_pooling(config.pooling, hidden_size)
    if isinstance(config, BiEncoderConfig) and config.projections:
        return ProjectedPooling(pooling, hidden_size, config.projections)
    return pooling


def build_pooling(  # noqa: PLR0911  # one return for each kind
    config: PoolingConfig, hidden_size: int
) -> nn.Module:
    """Build the pooling layer of a config: `(hidden, attention_mask, pool_mask)` → (B, H) float32.

    Raises:
        ConfigError: heads that do not fit the hidden size.
    """
    match config:
        case MeanPooling():
            return Mean()
        case ClsPooling():
            return Cls()
        case EosPooling():
            return Eos()
        case MaxPooling():
            return Max()
        case WeightedMeanPooling():
            return WeightedMean()
        case LatentAttentionPooling():
            return build_latent_attention(config, hidden_size)
        case SelfAttentionPooling():
            check_heads(hidden_size, config.num_heads)
            return SelfAttention(
                hidden_size, num_heads=config.num_heads, mlp_ratio=config.mlp_ratio
            )

"""Pooling: one float32 vector for each text from hidden states, not normalised."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rayembed.config.pooling import (
    ClsPooling,
    EosPooling,
    MaxPooling,
    MeanPooling,
    PlainPooling,
    ProjectionConfig,
    WeightedMeanPooling,
)

_ACTIVATIONS = {"identity": nn.Identity, "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def masked_mean(
    hidden: Float[Tensor, "batch tokens hidden"], mask: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch hidden"]:
    """Mean of the states where the mask is true, float32; no row may be empty.

    Multiplying by 0 and 1 is exact in bfloat16, so only the sum needs float32.
    """
    kept = hidden * mask.unsqueeze(-1).to(hidden.dtype)
    sums = kept.sum(dim=1, dtype=torch.float32)
    return sums / mask.sum(dim=1, keepdim=True, dtype=torch.float32)


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
        self.width = configs[-1].width
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


def pooled_width(pooling: nn.Module, hidden_size: int) -> int:
    """Width of what a pooling layer gives."""
    return pooling.width if isinstance(pooling, ProjectedPooling) else hidden_size


def build_pooling(config: PlainPooling) -> nn.Module:
    """Build a pooling without weights: `(hidden, attention_mask, pool_mask)` → (B, H) float32."""
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

"""Pooling layers, which turn the hidden states of a text into one float32 vector, not
normalised.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rayembed.config.backbone import PlainPooling, ProjectionConfig
from rayembed.models.attention.packed import Packed

States = Float[Tensor, "*tokens hidden"]
"""Padded (B, T, H), or packed (T, H)."""
PoolMask = Bool[Tensor, "*tokens"]
Pooled = Float[Tensor, "batch hidden"]
Layout = Tensor | Packed
"""Where the texts stand: the attention mask (B, T) of padded ones, or the ends of packed ones."""

_ACTIVATIONS = {"identity": nn.Identity, "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def masked_mean(hidden: States, mask: PoolMask, layout: Layout | None = None) -> Pooled:
    """Compute the float32 mean of each text's states where the mask is true; each text needs at
    least one such state.

    Multiplying by 0 and 1 is exact in bfloat16, so only the sum needs float32.

    Args:
        layout: where packed texts stand; padded ones need none.
    """
    kept = hidden * mask.unsqueeze(-1).to(hidden.dtype)
    if isinstance(layout, Packed):
        return layout.sums(kept) / layout.sums(mask).unsqueeze(-1)
    sums = kept.sum(dim=1, dtype=torch.float32)
    return sums / mask.sum(dim=1, keepdim=True, dtype=torch.float32)


def every_token(hidden: States, layout: Layout) -> PoolMask:
    """Return the mask of all tokens that are not padding."""
    if isinstance(layout, Packed):
        return torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    return layout.bool()


class Pooling(nn.Module):
    """Pooling without weights, by one of the functions below."""

    def __init__(self, function: Callable[[Tensor, Layout, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
        """Pool the states to one float32 vector for each text."""
        return self.function(hidden, layout, pool_mask)


def mean(hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
    """Mean of the states of the tokens in `pool_mask`, float32."""
    return masked_mean(hidden, pool_mask, layout)


def cls(hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
    """State of the first token, float32."""
    states = hidden[layout.firsts] if isinstance(layout, Packed) else hidden[:, 0]
    return states.float()


def eos(hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
    """State of the last token that is not padding (which follows the text), float32."""
    if isinstance(layout, Packed):
        return hidden[layout.lasts].float()
    last = layout.sum(dim=1) - 1
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last].float()


def largest(hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
    """Maximum of each dimension over the states of the tokens in `pool_mask`, float32."""
    kept = hidden.float().masked_fill(~pool_mask[..., None], float("-inf"))
    return layout.largest(kept) if isinstance(layout, Packed) else kept.amax(dim=1)


def weighted_mean(hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
    """Mean of the states of the tokens in `pool_mask`, weighted by position (1, 2, 3, …),
    float32.

    Padding goes right.
    """
    if isinstance(layout, Packed):
        weights = (pool_mask * (layout.positions(len(hidden)) + 1)).float()
        return layout.sums(hidden * weights.unsqueeze(-1)) / layout.sums(weights).unsqueeze(-1)
    positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    weights = (pool_mask * positions).float()
    weights = weights / weights.sum(dim=1, keepdim=True)
    return torch.einsum("bth,bt->bh", hidden.float(), weights)


_POOLINGS = {"mean": mean, "cls": cls, "eos": eos, "max": largest, "weighted_mean": weighted_mean}


class Projection(nn.Module):
    """Linear layer and activation applied to pooled vectors."""

    def __init__(self, in_width: int, config: ProjectionConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(in_width, config.width, bias=config.bias)
        self.activation = _ACTIVATIONS[config.activation]()

    def forward(self, vectors: Float[Tensor, "batch width"]) -> Float[Tensor, "batch out"]:
        """Project vectors to the layer's width, in its dtype."""
        projected: Tensor = self.activation(self.linear(vectors.to(self.linear.weight.dtype)))
        return projected


class ProjectedPooling(nn.Module):
    """Pooling layer followed by linear projections."""

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

    def forward(self, hidden: States, layout: Layout, pool_mask: PoolMask) -> Pooled:
        """Pool and project; the result is float32."""
        vectors: Tensor = self.pooling(hidden, layout, pool_mask)
        for projection in self.projections:
            vectors = projection(vectors)
        return vectors.float()


def pooled_width(pooling: nn.Module, hidden_size: int) -> int:
    """Return the width of a pooling layer's output."""
    return pooling.width if isinstance(pooling, ProjectedPooling) else hidden_size


def build_pooling(config: PlainPooling) -> Pooling:
    """Build a pooling without weights; it maps `(hidden, layout, pool_mask)` to (B, H) float32."""
    return Pooling(_POOLINGS[config.kind])

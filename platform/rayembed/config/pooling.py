"""Pooling settings: from token states to one vector for each text."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from rayembed.config.settings import Settings


class MeanPooling(Settings):
    """Mean of the hidden states of all tokens that are neither padding nor instruction."""

    kind: Literal["mean"] = "mean"


class ClsPooling(Settings):
    """Hidden state of the first token."""

    kind: Literal["cls"] = "cls"


class EosPooling(Settings):
    """Hidden state of the last token that is not padding."""

    kind: Literal["eos"] = "eos"


class MaxPooling(Settings):
    """Largest value of each dimension over all tokens that are not padding."""

    kind: Literal["max"] = "max"


class WeightedMeanPooling(Settings):
    """Mean of the tokens' hidden states, the first weighing 1, the second 2, and so on.

    For decoders that keep their causal mask (SGPT, arXiv 2202.08904, section 3.1.2).
    """

    kind: Literal["weighted_mean"] = "weighted_mean"


class LatentAttentionPooling(Settings):
    """Cross-attention of the tokens to a trained array of latents, an MLP, then the mean."""

    kind: Literal["latent_attention"] = "latent_attention"
    num_latents: PositiveInt = 512
    """Number of latents (r in NV-Embed, Table 11)."""
    num_heads: PositiveInt = 8
    """Number of attention heads (NV-Embed, Table 11)."""
    head_dim: PositiveInt | None = None
    """Width of a head; None is the hidden size, as in the released checkpoint, not a fraction of
    it."""
    mlp_ratio: PositiveInt = 4
    """Inner width of the MLP over the hidden size."""
    form: Literal["released", "paper"] = "released"
    """`released`: separate key and value projections, pre-norms, residuals, GEGLU, as in
    nvidia/NV-Embed-v2. `paper`: equation 1 taken literally, K = V = latents, a plain GELU MLP."""


class SelfAttentionPooling(Settings):
    """One self-attention block over the tokens, then the mean (NV-Embed, section 5.2.2)."""

    kind: Literal["self_attention"] = "self_attention"
    num_heads: PositiveInt = 8
    """Heads of the block."""
    mlp_ratio: PositiveInt = 4
    """Inner width of the MLP over the hidden size."""


PlainPooling = Annotated[
    MeanPooling | ClsPooling | EosPooling | MaxPooling | WeightedMeanPooling,
    Field(discriminator="kind"),
]
"""A pooling without weights."""


class ProjectionConfig(Settings):
    """A linear layer on the pooled vector, which changes its width (`Dense` elsewhere)."""

    width: PositiveInt
    """Width of the output vector."""
    bias: bool = True
    activation: Literal["identity", "tanh", "relu", "gelu"] = "identity"
    """Activation after the linear map."""

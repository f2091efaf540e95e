"""NV-Embed: a decoder without its causal mask and a pooling layer (arXiv 2405.17428)."""

from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.nvembed.tokens import NVEmbedTokenizer
from rayembed.models.transformer_model import PooledTransformer


class NVEmbed(PooledTransformer):
    """Bidirectional (or causal) decoder with pooling; instruction tokens take part in attention but
    are not pooled.

    Parameters are `backbone.…` as transformers names them and `pooling.…` as the released
    checkpoints name their `latent_attention_model.…`.
    """

    config: NVEmbedConfig
    tokenizer: NVEmbedTokenizer

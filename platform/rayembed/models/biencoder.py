"""A plain bi-encoder: any encoder (or decoder) of transformers with simple pooling."""

from rayembed.config.model import BiEncoderConfig
from rayembed.models.pooled_transformer import PooledTransformer
from rayembed.models.tokens import BiEncoderTokenizer


class BiEncoder(PooledTransformer):
    """Queries and documents share all weights; they may differ in prefix and length."""

    config: BiEncoderConfig
    tokenizer: BiEncoderTokenizer

"""A plain bi-encoder: any encoder (or decoder) of transformers with simple pooling."""

from rayembed.config.model import BiEncoderConfig
from rayembed.models.pooled_transformer import PooledTransformer
from rayembed.models.tokens import BiEncoderTokenizer


class BiEncoder(PooledTransformer):
    """Bi-encoder with shared weights; queries and documents may differ in prefix and length."""

    config: BiEncoderConfig
    tokenizer: BiEncoderTokenizer

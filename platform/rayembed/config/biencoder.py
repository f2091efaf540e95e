"""Plain bi-encoders: a backbone, a pooling, linear layers."""

from typing import Literal

from pydantic import PositiveInt

from rayembed.config.backbone import BackboneConfig
from rayembed.config.lora import LoraConfig
from rayembed.config.pooling import BiEncoderPooling, MeanPooling
from rayembed.config.settings import Settings


class ProjectionConfig(Settings):
    """A linear layer on the pooled vector, which changes its width (`Dense` elsewhere)."""

    width: PositiveInt
    """Of the vector that it gives."""
    bias: bool = True
    activation: Literal["identity", "tanh", "relu", "gelu"] = "identity"
    """What stands behind the linear map."""


class BiEncoderConfig(Settings):
    """Any encoder of transformers, or a decoder under its own causal mask, with simple pooling."""

    kind: Literal["biencoder"] = "biencoder"
    backbone: BackboneConfig
    pooling: BiEncoderPooling = MeanPooling()
    """`eos` is the last token, which fits decoders whose tokenizer ends a text with EOS."""
    projections: tuple[ProjectionConfig, ...] = ()
    """Layers on the pooled vector, in their order. They start from the weights of the start model's
    Dense modules, which must be of these shapes, or from random where it has none."""
    lora: LoraConfig | None = None
    """None trains the whole backbone."""
    query_prefix: str = ""
    """Put before every query, for instance `query: `."""
    document_prefix: str = ""
    """Put before every document, for instance `passage: `."""
    query_max_length: PositiveInt = 512
    """Tokens, special ones included."""
    document_max_length: PositiveInt = 512
    """Tokens, special ones included."""

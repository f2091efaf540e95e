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
    """Width of the output vector."""
    bias: bool = True
    activation: Literal["identity", "tanh", "relu", "gelu"] = "identity"
    """Activation after the linear map."""


class BiEncoderConfig(Settings):
    """Any encoder of transformers, or a decoder under its own causal mask, with simple pooling."""

    kind: Literal["biencoder"] = "biencoder"
    backbone: BackboneConfig
    pooling: BiEncoderPooling = MeanPooling()
    """`eos` is the last token, which fits decoders whose tokenizer ends a text with EOS."""
    projections: tuple[ProjectionConfig, ...] = ()
    """Projections of the pooled vector, in order. Initialised from the start model's Dense modules,
    which must have these shapes, or randomly if it has none."""
    lora: LoraConfig | None = None
    """LoRA adapters; None trains the whole backbone."""
    query_prefix: str = ""
    """Text before every query, for instance `query: `."""
    document_prefix: str = ""
    """Text before every document, for instance `passage: `."""
    query_max_length: PositiveInt = 512
    """Maximum tokens of a query, special ones included."""
    document_max_length: PositiveInt = 512
    """Maximum tokens of a document, special ones included."""

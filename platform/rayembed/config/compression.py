"""Compression of a finished model as settings, and the table of the ways there are.

A way is one file of `compression/`: its settings, and a function from a model's folder to another.
"""

from typing import ClassVar, Literal

from rayembed.config.settings import Settings
from rayembed.config.table import Table

Structure = Literal["unstructured", "2:4", "4:8"]
"""Where the zeros of pruned weights may stand: anywhere in a matrix, or so many of each group of 4
or 8 neighbours in a row, as some GPUs multiply them."""

Scheme = Literal["INT8", "FP8_DYNAMIC"]
"""How weights and inputs are rounded to 8 bits, in the words of compressed-tensors."""


class CompressionConfig(Settings):
    """Settings of one way to make a model smaller or faster.

    Ways derive from `compression.contract.Compression`.
    """

    kind: str

    needs_texts: ClassVar[bool] = False
    """Whether it looks at what calibration texts do in the model."""

    @property
    def label(self) -> str:
        """Short name of the variant, also of its folder: letters, digits, `-` and `.`."""
        return self.kind


COMPRESSIONS = Table(
    "rayembed.compressions",
    CompressionConfig,
    (
        "rayembed.compression.magnitude:Magnitude",
        "rayembed.compression.layers:Layers",
        "rayembed.compression.vocabulary:Vocabulary",
        "rayembed.compression.wanda:Wanda",
        "rayembed.compression.sparsegpt:SparseGPT",
        "rayembed.compression.gptq:GPTQ",
        "rayembed.compression.int8:Int8",
        "rayembed.compression.fp8:Fp8",
        "rayembed.compression.onnx_graph:Onnx",
        "rayembed.compression.openvino_graph:OpenVINO",
    ),
)
"""All ways to compress a model by their `kind`."""

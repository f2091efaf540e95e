"""Settings of a model that is a graph for a runtime of CPUs, as its folder states them."""

from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from rayembed.config.settings import Settings
from rayembed.config.types import FileName

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

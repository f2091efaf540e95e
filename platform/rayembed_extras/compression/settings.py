"""Registry of the compression methods, and the parser of their settings on the command line."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import yaml
from pydantic import NonNegativeInt, PositiveInt

from rayembed.config.document import read_yaml
from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable
from rayembed.config.types import FileName
from rayembed.errors import ConfigError
from rayembed_extras.compression.contract import Compression

Runtime = Literal["onnx", "openvino"]
"""Library that runs a graph: onnxruntime or OpenVINO."""

RUNTIME_PACKAGES: Mapping[Runtime, str] = {"onnx": "onnxruntime", "openvino": "openvino"}
"""Runtime → the package and module that runs its graphs."""

GraphPrecision = Literal["float32", "int8-dynamic", "int8-static"]
"""Number type of a graph's large products: float32, or int8 weights with int8 activations whose
range comes from each batch (dynamic) or from calibration texts (static)."""

Floats = Literal["float32", "bfloat16"]


class GraphConfig(Settings):
    """How to run the graphs in a model's folder; stored as `graph` in its `rayembed.json`."""

    runtime: Runtime
    """Library that runs the graphs."""
    precision: GraphPrecision = "float32"
    """Number type of large products."""
    floats: Floats = "float32"
    """Number type of all operations that are not int8, if the processor supports it."""
    file: FileName
    """File of the graph from token ids and masks to unit vectors."""
    context_file: FileName | None = None
    """File of the graph from a document's tokens to its context vector, for contextual models."""
    context_width: NonNegativeInt = 0
    """Width of context vectors."""
    max_context: PositiveInt | None = None
    """Maximum number of context documents."""
    added_tokens: NonNegativeInt = 0
    """Positions that the graph adds to each text; each costs as much as a token."""


COMPRESSIONS = SettingsTable(
    "rayembed.compressions",
    Compression,
    (
        "rayembed_extras.compression.layers:Layers",
        "rayembed_extras.compression.vocabulary:Vocabulary",
        "rayembed_extras.compression.gptq:GPTQ",
        "rayembed_extras.compression.quantised:Int8",
        "rayembed_extras.compression.quantised:Fp8",
        "rayembed_extras.compression.runtimes:Onnx",
        "rayembed_extras.compression.runtimes:OpenVINO",
    ),
)
"""Compression methods by `kind`."""


def settings_in(text: str) -> dict[str, Any]:
    """Parse the settings of a method from `kind,setting=value,…`.

    Values are YAML; commas within brackets part no settings: `layers,which=[0,3,5]`.

    Raises:
        ConfigError: no `setting=value`, one that is there twice, or a value that is no YAML.
    """
    kind, *settings = re.split(r",(?![^\[\]{}]*[\]}])", text)
    found: dict[str, Any] = {"kind": kind}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"{text!r}: {setting!r} is not a setting; write kind,setting=value, such as "
                "layers,share=0.5"
            )
        if name in found:
            raise ConfigError(f"{text!r} sets {name} twice; set it once")
        try:
            # YAML takes 2:4 for a number to the base of 60.
            found[name] = value if re.fullmatch(r"\d+:\d+", value) else read_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(
                f"{text!r}: {name}={value} cannot be read; quote values that begin with *, such "
                "as skip=['*.attention.*']"
            ) from None
    return found

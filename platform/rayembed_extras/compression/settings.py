"""The table of the ways to compress a model, and their settings as a command has them."""

import re
from typing import Any

import yaml

from rayembed.config.document import read_yaml
from rayembed.config.table import Table
from rayembed.errors import ConfigError
from rayembed_extras.compression.contract import Compression

COMPRESSIONS = Table(
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
"""All ways to compress a model by their `kind`."""


def settings_in(text: str) -> dict[str, Any]:
    """Settings of a way from `kind,setting=value,…`, as a command has it.

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
                f"{text!r}: {setting!r} is no setting; write "
                "kind,setting=value, as layers,share=0.5"
            )
        if name in found:
            raise ConfigError(f"{text!r} names {name} twice; once is enough")
        try:
            # YAML takes 2:4 for a number to the base of 60.
            found[name] = value if re.fullmatch(r"\d+:\d+", value) else read_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(
                f"{text!r}: {name}={value} cannot be read; what begins with * stands in quotes, as "
                "skip=['*.attention.*']"
            ) from None
    return found

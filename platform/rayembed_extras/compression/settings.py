"""Compression of a finished model as settings, and the table of the ways there are.

A way is one file of `compression/`: its settings, and a function from a model's folder to another.
"""

import re
from typing import Any, ClassVar, Literal

import yaml

from rayembed.config.document import read_yaml
from rayembed.config.settings import Settings
from rayembed.config.table import Table
from rayembed.errors import ConfigError

Scheme = Literal["INT8", "FP8_DYNAMIC"]
"""How weights and inputs are rounded to 8 bits, in the words of compressed-tensors."""


class CompressionConfig(Settings):
    """Settings of one way to make a model smaller or faster.

    Ways derive from `compression.contract.Compression`.
    """

    kind: str

    needs_texts: ClassVar[bool] = False
    """Whether it looks at what calibration texts do in the model."""
    is_cut: ClassVar[bool] = False
    """Whether what is left is a whole smaller model, which is trained on as any other."""

    @property
    def fewest_texts(self) -> int:
        """Fewest calibration texts that it takes."""
        return int(self.needs_texts)

    @property
    def label(self) -> str:
        """Short name of the variant, also of its folder: letters, digits, `-` and `.`."""
        return self.kind


COMPRESSIONS = Table(
    "rayembed.compressions",
    CompressionConfig,
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

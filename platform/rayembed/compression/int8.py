"""8-bit integers, each weight rounded to the nearest."""

from typing import ClassVar, Literal

from rayembed.compression.quantised import Quantised
from rayembed.config.compression import Scheme


class Int8(Quantised):
    """Weights and inputs as 8-bit integers, symmetric around zero; it looks at no texts."""

    kind: Literal["int8"] = "int8"

    scheme: ClassVar[Scheme] = "INT8"

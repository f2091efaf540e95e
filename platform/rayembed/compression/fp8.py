"""8-bit floating-point numbers, each weight rounded to the nearest."""

from typing import ClassVar, Literal

from rayembed.compression.quantised import Quantised
from rayembed.config.compression import Scheme


class Fp8(Quantised):
    """Weights and inputs as E4M3 numbers, which GPUs from Ada and Hopper on multiply; no texts."""

    kind: Literal["fp8"] = "fp8"

    scheme: ClassVar[Scheme] = "FP8_DYNAMIC"

"""Convert unit vectors to int8 or to bits and back, the same way in training, evaluation and
serving.

int8. A component x of a unit vector of width D becomes the integer nearest to 127·x/r (ties to the
even one), cut to -127 … 127, with r = min(1, 8/√D). The range is fixed by the width alone, so that
no calibration has to be kept beside a model, vectors of different batches are comparable, and inner
products of codes are cosines times (127/r)². Components of unit vectors are about 1/√D, so that the
range holds eight times as much (all-MiniLM's largest of 1,500 texts is 5.8 times) and a step is 6 %
of a component: the cosine of a vector with its code is about 0.9998. A larger component is cut.

Binary. A bit is 1 where the component is above 0. Bits are packed eight to a byte, the first
dimension highest; missing bits of the last byte are 0. As numbers they are ±1/√D, so that an inner
product is 1 - 2·(different bits)/D.

N vectors, D embedding width, B = ⌈D/8⌉ bytes.
"""

import math

import numpy as np

from rayembed.config.types import Precision

LEVELS = 127
"""Largest code; -128 is not used, so that a vector and its opposite have opposite codes."""

_TIMES_USUAL = 8.0


def int8_range(width: int) -> float:
    """Return the size of a vector component that int8 code 127 represents."""
    return min(1.0, _TIMES_USUAL / math.sqrt(width))


def int8_step(width: int) -> float:
    """Return the difference between the values of neighbouring int8 codes."""
    return int8_range(width) / LEVELS


def bit_value(width: int) -> float:
    """Return the absolute value that each bit of a binary vector represents."""
    return 1 / math.sqrt(width)


def to_int8(vectors: np.ndarray) -> np.ndarray:
    """Quantise (N, D) unit vectors to (N, D) int8 codes."""
    # Multiplied, not divided, and in float32: torch does the same to the bit.
    scaled = np.asarray(vectors, np.float32) * np.float32(1 / int8_step(vectors.shape[-1]))
    codes: np.ndarray = np.clip(np.rint(scaled), -LEVELS, LEVELS).astype(np.int8)
    return codes


def to_bits(vectors: np.ndarray) -> np.ndarray:
    """Pack the signs of (N, D) vectors to (N, B) uint8."""
    return np.packbits(vectors > 0, axis=-1)


def from_int8(codes: np.ndarray) -> np.ndarray:
    """Convert (N, D) int8 codes to (N, D) float32 vectors, whose length is 1 up to rounding."""
    return codes.astype(np.float32) * np.float32(int8_step(codes.shape[-1]))


def from_bits(packed: np.ndarray, width: int) -> np.ndarray:
    """Convert (N, B) packed signs to (N, D) float32 vectors.

    Args:
        width: D.
    """
    signs = np.unpackbits(packed, axis=-1, count=width).astype(np.float32) * 2 - 1
    return signs * np.float32(bit_value(width))


def quantised(vectors: np.ndarray, precision: Precision) -> np.ndarray:
    """Quantise (N, D) unit vectors and convert them back to (N, D) float32, to see what their
    stored form preserves.
    """
    match precision:
        case "float32":
            return vectors
        case "int8":
            return from_int8(to_int8(vectors))
        case "binary":
            return from_bits(to_bits(vectors), vectors.shape[-1])

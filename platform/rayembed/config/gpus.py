"""GPUs by name, with the memory that a run has on them."""

import re
from collections.abc import Mapping
from types import MappingProxyType

GPUS: Mapping[str, int] = MappingProxyType(
    {
        "B200": 178,
        "H200": 140,
        "H100": 79,
        "A100 80 GB": 79,
        "L40S": 45,
        "A100 40 GB": 39,
        "A10G": 22,
        "L4": 22,
        "T4": 15,
    }
)
"""GiB of GPUs by name as drivers tell them, a little less than they are sold with."""


def known_gpu(name: str) -> str:
    """The name in `GPUS` that is meant; case, spaces and hyphens do not count.

    Raises:
        ValueError: there is none.
    """
    for known in GPUS:
        if _letters(known) == _letters(name):
            return known
    raise ValueError(f"no GPU {name!r} is known here; known are {', '.join(GPUS)}")


def ray_kind(name: str) -> str:
    """Return Ray's name for a kind of `GPUS`, which does not tell sizes of memory apart."""
    return name.partition(" ")[0]


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()

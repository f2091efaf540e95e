"""GPUs by name, with the memory that a run has on them."""

import re
from collections.abc import Collection, Mapping
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
    """Return Ray's own name for a kind of `GPUS`, which is one for all sizes of memory."""
    return name.partition(" ")[0]


def is_kind(name: str, kinds: Collection[str]) -> bool:
    """Return whether a GPU to which Ray gives these names (`A100`, `A100-80G`) is of a kind of
    `GPUS`; a size of memory counts where Ray names one.
    """
    kind = ray_kind(name)
    sized = [known for known in kinds if known.startswith(f"{kind}-")]
    if sized and kind != name:
        return any(_letters(name).startswith(_letters(known)) for known in sized)
    return bool(sized) or kind in kinds


def is_device(name: str, device: str) -> bool:
    """Return whether a kind of `GPUS` is the device that a driver names so: `NVIDIA A100-SXM4-80GB`
    is an `A100 80 GB`.
    """
    kind, _, size = name.partition(" ")
    words = re.findall(r"[a-z0-9]+", device.lower())
    return kind.lower() in words and (not size or _letters(size) in words)


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()

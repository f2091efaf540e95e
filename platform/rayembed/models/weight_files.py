"""Safetensors files of a model folder: headers and weights."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from torch import Tensor

from rayembed.errors import ArtifactError
from rayembed.models.json_file import read_json

_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size in bytes, the limit of safetensors itself."""


def check_weight_files(folder: Path) -> None:
    """Check that every safetensors file is complete and every file named by an index exists.

    Raises:
        ArtifactError: files are missing or cut off, as a copy that was broken off leaves them.
    """
    for index in sorted(folder.rglob("*.safetensors.index.json")):
        named = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in named if not (index.parent / name).is_file()]
        if missing:
            raise ArtifactError(
                f"the model in {str(folder)!r} is incomplete: {index.name} names {len(named)} "
                f"files, of which {len(missing)} are missing: {', '.join(missing[:5])}; copy or "
                "download the folder again"
            )
    for path in sorted(folder.rglob("*.safetensors")):
        read_header(path)


def weight_paths(folder: Path) -> list[Path]:
    """`model.safetensors` of a folder, or the files of its index; empty if it has neither.

    Raises:
        ArtifactError: the index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        return [folder / name for name in names]
    path = folder / "model.safetensors"
    return [path] if path.is_file() else []


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file by name, on the CPU.

    Raises:
        ArtifactError: there is no such file, or it is damaged.
    """
    import safetensors
    import safetensors.torch

    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot read the weights {str(path)!r}: {error}") from error


def count_parameters(folder: Path) -> int | None:
    """Number of parameters in the folder's safetensors files; None for weights in other formats."""
    files = sorted(folder.rglob("*.safetensors"))
    if not files or any(folder.rglob("pytorch_model*.bin")):
        return None
    tensors = [tensor for path in files for tensor in read_header(path).values()]
    return int(sum(math.prod(tensor["shape"]) for tensor in tensors))


def read_header(path: Path) -> dict[str, Any]:
    """Type, shape and position of each tensor of a safetensors file, by name.

    Raises:
        ArtifactError: not such a file, or shorter than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        text = file.read(length) if length <= min(_MAX_HEADER_BYTES, size - 8) else b""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ArtifactError(
            f"{str(path)!r} is cut off or no safetensors file ({size} bytes); copy or download it "
            "again"
        ) from error
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
    if size < end:
        raise ArtifactError(
            f"{str(path)!r} is cut off: it has {size} bytes and its header tells of {end}; copy or "
            "download it again"
        )
    return tensors

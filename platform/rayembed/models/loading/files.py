"""Read and write the files of model folders: JSON, safetensors, and a fingerprint of a whole
folder.
"""

import json
import math
import re
import struct
import time
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import xxhash
from torch import Tensor

from rayembed.assets.cache import cache_folder, filled
from rayembed.assets.folder_formats import PROOF_FOLDER
from rayembed.assets.names import below
from rayembed.assets.sentence_modules import no_pickled_objects
from rayembed.errors import ArtifactError, AssetError

_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size in bytes, the limit of safetensors itself."""

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".onnx", ".data", ".xml")
_NAMES = frozenset(
    {
        "config.json",
        "modules.json",
        "rayembed.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.txt",
        "vocab.json",
        "merges.txt",
    }
)
_TRAINING_STATE = re.compile(
    r"training_args\.bin|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin"
)
"""Files that the trainers of transformers and Accelerate leave beside the weights."""
_BLOCK = 1 << 24

_DIGITS = "weights.txt"

_SETTLED_SECONDS = 10.0
"""Age of the last file at which its time tells it from a later one of the same size."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ArtifactError: no such file, not JSON, or not an object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ArtifactError(
            f"{str(path)!r} must contain a JSON object, not a {type(value).__name__}"
        )
    return value


def read_json_value(path: Path) -> Any:
    """Read a JSON value from a file.

    Raises:
        ArtifactError: no such file or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {str(path)!r}: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_weight_files(folder: Path) -> None:
    """Check that every safetensors file is complete and every file named by an index exists.

    Raises:
        ArtifactError: files are missing or cut off, as a copy that was broken off leaves them.
    """
    for index in sorted(folder.rglob("*.safetensors.index.json")):
        named = _indexed(index)
        missing = [path.name for path in named if not path.is_file()]
        if missing:
            raise ArtifactError(
                f"the model in {str(folder)!r} is incomplete: {index.name} names {len(named)} "
                f"files, of which {len(missing)} are missing: {', '.join(missing[:5])}; copy or "
                "download the folder again"
            )
    for path in sorted(folder.rglob("*.safetensors")):
        read_header(path)


def weight_paths(folder: Path) -> list[Path]:
    """Return a folder's `model.safetensors`, or the files that its index names; empty if it has
    neither.

    Raises:
        ArtifactError: the index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    path = folder / "model.safetensors"
    return [path] if path.is_file() else []


def _indexed(index: Path) -> list[Path]:
    """Return the paths of the weight files that an index names; they must be in its folder or
    below.
    """
    names = sorted(set(map(str, read_json(index).get("weight_map", {}).values())))
    return [below(index.parent, name, f"the index {str(index)!r}") for name in names]


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors or torch file by name, on the CPU.

    Raises:
        ArtifactError: there is no such file, it is damaged, or holds other objects than tensors.
    """
    import safetensors
    import safetensors.torch

    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with no_pickled_objects(path):
            return dict(torch.load(path, "cpu", weights_only=True, mmap=is_zipfile(path)))
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot read the weights {str(path)!r}: {error}") from error


def count_parameters(folder: Path) -> int | None:
    """Count the parameters in the folder's safetensors files; None for weights in other formats."""
    files = sorted(p for p in folder.rglob("*.safetensors") if p.parent.name != PROOF_FOLDER)
    if not files or any(folder.rglob("pytorch_model*.bin")):
        return None
    tensors = [tensor for path in files for tensor in read_header(path).values()]
    return int(sum(math.prod(tensor["shape"]) for tensor in tensors))


def read_header(path: Path) -> dict[str, Any]:
    """Read dtype, shape and offset of each tensor from the header of a safetensors file.

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
            f"{str(path)!r} is cut off or is not a safetensors file ({size} bytes); copy or "
            "download it again"
        ) from error
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
    if size < end:
        raise ArtifactError(
            f"{str(path)!r} is cut off: it has {size} bytes, but its header states {end} bytes; "
            "copy or download it again"
        )
    return tensors


def weights_fingerprint(folder: Path) -> str:
    """Compute 12 hexadecimal digits that identify a model: a hash of its weights, tokenizer and
    settings.

    Model cards, the proof, training state and file times do not count. The same content gives the
    same digits on every machine. Of many processes of a machine with an asset cache one reads the
    files, and again only when one of them was written since.

    Raises:
        ArtifactError: no weights in the folder.
    """
    files = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if _counts(path)
    )
    if not any(name.endswith(_WEIGHTS) for name in files):
        raise ArtifactError(f"cannot compute a fingerprint: no weights in {str(folder)!r}")
    states = [(folder / name).stat() for name in files]
    written = max(max(state.st_mtime, state.st_ctime) for state in states)
    # A file may be written twice within what its time resolves, and have the same size.
    if time.time() - written < _SETTLED_SECONDS or not cache_folder().is_dir():
        return _fingerprint_of(folder, files)
    known = [
        (name, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for name, state in zip(files, states, strict=True)
    ]
    key = xxhash.xxh3_128_hexdigest(json.dumps([str(folder.absolute()), known]).encode())

    def read(entry: Path) -> None:
        (entry / _DIGITS).write_text(_fingerprint_of(folder, files))

    try:
        folder = filled(cache_folder() / "digests" / key, read, checked=True)
        return (folder / _DIGITS).read_text()
    except AssetError:  # a cache that others fill
        return _fingerprint_of(folder, files)


def _fingerprint_of(folder: Path, files: list[str]) -> str:
    digest = xxhash.xxh3_128()
    for name in files:
        path = folder / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()[:12]


def _counts(path: Path) -> bool:
    named = path.name in _NAMES or path.suffix in (*_WEIGHTS, ".model")
    named = named and path.parent.name != PROOF_FOLDER
    return named and not _TRAINING_STATE.fullmatch(path.name) and path.is_file()

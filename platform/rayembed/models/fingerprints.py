"""Content fingerprint of a model folder, twelve characters."""

import re
from pathlib import Path

import xxhash

from rayembed.errors import ArtifactError

_WEIGHTS = (".safetensors", ".bin", ".gguf")
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


def weights_fingerprint(folder: Path) -> str:
    """12 hexadecimal digits of the names and contents of weights, tokenizer and settings.

    Model cards, training state and file times do not count. The same content gives the same
    digits on every machine.

    Raises:
        ArtifactError: no weights in the folder.
    """
    files = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if _counts(path)
    )
    if not any(name.endswith(_WEIGHTS) for name in files):
        raise ArtifactError(f"no weights in {str(folder)!r} to take a fingerprint of")
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
    return named and not _TRAINING_STATE.fullmatch(path.name) and path.is_file()

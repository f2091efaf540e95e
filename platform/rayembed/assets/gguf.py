"""Decoders in GGUF files, converted once into a folder for transformers.

The weights are dequantised and stay float32, exactly the numbers that the quantised file stands
for: rounding them a second time, to bfloat16, is the loading model's decision.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from rayembed.assets.cache import filled
from rayembed.errors import AssetError

_FORMAT = 1  # raised when a conversion gives other files, so that cached ones are not used


def convert_gguf(file: Path, cache: Path) -> Path:
    """Convert a GGUF file to a folder with safetensors (float32), configuration and tokenizer.

    The conversion is cached by the file's place, size and time. For SmolLM2 with its 135 million
    parameters it took 10 to 25 seconds and 1.3 GB of memory on two cores.

    Raises:
        AssetError: not GGUF, damaged, or an architecture that transformers cannot convert.
    """
    import transformers

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise AssetError(f"{str(file)!r} is not a GGUF file: it does not start with 'GGUF'")
    status = file.stat()
    identity = [str(file), status.st_size, status.st_mtime_ns, transformers.__version__, _FORMAT]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return filled(cache / "gguf" / f"{file.stem}-{key}", lambda folder: _convert(file, folder))


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    try:
        model = AutoModel.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            trust_remote_code=False,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise AssetError(f"cannot convert the GGUF file {str(file)!r}: {error}") from error
    set_special_tokens(tokenizer, model.config)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def set_special_tokens(tokenizer: Any, config: Any) -> None:
    """Set the tokenizer's BOS, EOS and padding tokens from the model's configuration, in place.

    A tokenizer made from GGUF can name others: that of SmolLM2 says `<|im_start|>` for BOS and
    EOS, while the configuration says id 1 and id 2 (`<|im_end|>`). Where the configuration names
    none, the tokenizer's own stays; without any padding token it is EOS. Padding goes right.

    Raises:
        AssetError: an id that the vocabulary does not have, or neither padding nor EOS.
    """
    for name in ("bos", "eos", "pad"):
        token_id = getattr(config, f"{name}_token_id", None)
        if isinstance(token_id, list | tuple):
            token_id = token_id[0] if token_id else None
        if token_id is None:
            continue
        token = (
            tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else None
        )
        if token is None:
            raise AssetError(
                f"the model's {name}_token_id is {token_id}, but its tokenizer has the ids 0 to "
                f"{len(tokenizer) - 1}"
            )
        setattr(tokenizer, f"{name}_token", token)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise AssetError("the model names neither a padding nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"

"""Encoders of others: folders in sentence-transformers or plain transformers format."""

import struct
from pathlib import Path
from typing import Any

from rayembed.config.model import BackboneConfig, BiEncoderConfig, ClsPooling, Dtype, MeanPooling
from rayembed.errors import ArtifactError
from rayembed.models.json_file import read_json, read_json_value

_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "bfloat16": "bfloat16"}
_UNLIMITED = 10**6  # tokenizers without a limit say 1e30


def read_encoder_folder(
    folder: Path, *, dtype: Dtype | None = None
) -> tuple[BiEncoderConfig, Path]:
    """The settings that describe an encoder as a bi-encoder, and the folder of its transformer.

    Prompts named `query` and `document` (or `passage`, `corpus`) become the roles' prefixes. A
    folder without `modules.json` is taken with mean pooling.

    Raises:
        ArtifactError: modules other than transformer, mean or CLS pooling and normalisation.
    """
    if (folder / "modules.json").is_file():
        transformer, pooling = _read_modules(folder)
    else:
        transformer, pooling = folder, MeanPooling()
    prompts: dict[str, Any] = {}
    if (folder / "config_sentence_transformers.json").is_file():
        prompts = read_json(folder / "config_sentence_transformers.json").get("prompts") or {}
    document = next((prompts[n] for n in ("document", "passage", "corpus") if prompts.get(n)), "")
    length = _max_length(transformer)
    config = BiEncoderConfig(
        backbone=BackboneConfig(path=str(transformer), dtype=dtype or _saved_dtype(transformer)),
        pooling=pooling,
        query_prefix=prompts.get("query") or "",
        document_prefix=document,
        query_max_length=length,
        document_max_length=length,
    )
    return config, transformer


def _read_modules(folder: Path) -> tuple[Path, MeanPooling | ClsPooling]:
    modules = read_json_value(folder / "modules.json")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    own = all(str(module["type"]).startswith("sentence_transformers.") for module in modules)
    if not own or kinds not in (
        ["Transformer", "Pooling"],
        ["Transformer", "Pooling", "Normalize"],
    ):
        raise ArtifactError(
            f"{str(folder)!r} consists of the modules {[m['type'] for m in modules]}; supported "
            "are Transformer, Pooling and Normalize of sentence-transformers"
        )
    settings = read_json(folder / modules[1]["path"] / "config.json")
    modes = settings.get("pooling_mode") or [
        name.removeprefix("pooling_mode_")
        for name, value in settings.items()
        if name.startswith("pooling_mode_") and value
    ]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if modes in (["mean"], ["mean_tokens"]) and settings.get("include_prompt", True):
        return folder / modules[0]["path"], MeanPooling()
    if modes in (["cls"], ["cls_token"]):
        return folder / modules[0]["path"], ClsPooling()
    raise ArtifactError(
        f"{str(folder)!r} pools by {modes} with include_prompt="
        f"{settings.get('include_prompt', True)}; supported are mean or CLS with the prompt"
    )


def _max_length(transformer: Path) -> int:
    """The smallest of the limits that the folder states, as sentence-transformers has it."""
    path = transformer / "sentence_bert_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("do_lower_case"):
        raise ArtifactError(f"{str(path)!r} asks for lower-casing outside the tokenizer")
    if isinstance(settings.get("max_seq_length"), int):
        return int(settings["max_seq_length"])
    path = transformer / "tokenizer_config.json"
    limits = [
        (read_json(path) if path.is_file() else {}).get("model_max_length"),
        read_json(transformer / "config.json").get("max_position_embeddings"),
    ]
    found = [int(n) for n in limits if isinstance(n, int | float) and 0 < n < _UNLIMITED]
    if not found:
        raise ArtifactError(f"{str(transformer)!r} states no maximum length of a text")
    return min(found)


def _saved_dtype(transformer: Path) -> Dtype:
    """bfloat16 where weights or configuration say so, else float32."""
    config = read_json(transformer / "config.json")
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is None:
        stated = _first_tensor_dtype(transformer / "model.safetensors")
    return _DTYPES.get(str(stated), "float32")


def _first_tensor_dtype(path: Path) -> str | None:
    if not path.is_file():
        return None
    import json

    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ArtifactError(f"{str(path)!r} is cut off")
        (length,) = struct.unpack("<Q", prefix)
        try:
            header = json.loads(file.read(min(length, 100_000_000)))
        except ValueError as error:
            raise ArtifactError(f"{str(path)!r} is not a safetensors file: {error}") from error
    kinds = [value["dtype"] for name, value in header.items() if name != "__metadata__"]
    return kinds[0] if kinds else None

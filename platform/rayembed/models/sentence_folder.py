"""Modules of folders in sentence-transformers format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from rayembed.assets.names import below
from rayembed.config.backbone import Dtype
from rayembed.config.pooling import (
    ClsPooling,
    EosPooling,
    MaxPooling,
    MeanPooling,
    PlainPooling,
    ProjectionConfig,
    WeightedMeanPooling,
)
from rayembed.errors import ArtifactError
from rayembed.models.files import read_header, read_json, read_json_value, weight_paths

Activation = Literal["identity", "tanh", "relu", "gelu"]

ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}
"""Supported activation classes of a Dense module."""

POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling modes by the keys that denoted them before version 6 and may still occur."""

_SQRT = "mean_sqrt_len_tokens"
_POOLING: dict[str, PlainPooling] = {
    "cls": ClsPooling(),
    "max": MaxPooling(),
    "mean": MeanPooling(),
    "weightedmean": WeightedMeanPooling(),
    "lasttoken": EosPooling(),
    _SQRT: MeanPooling(),
}
_OF_TRANSFORMER: dict[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({}, None),
    "query_expansion": (None,),
    "query_length": (None,),
    "document_length": (None,),
    "model_args": ({},),
    "model_kwargs": ({},),
    "tokenizer_args": ({},),
    "processor_kwargs": ({},),
    "config_args": ({},),
    "config_kwargs": ({},),
}
"""Settings of a Transformer module that change vectors, with their neutral values."""


class Modules(NamedTuple):
    """Modules of a folder in sentence-transformers format."""

    transformer: Path
    pooling: PlainPooling
    projections: tuple[ProjectionConfig, ...]
    dense: tuple[Path, ...]
    normalized: bool


def load_projections(head: nn.Module, files: Sequence[Path]) -> None:
    """Load the weights of Dense modules into the projections of a model's head.

    Raises:
        ArtifactError: a file is damaged, or has other weights than its settings say.
    """
    import safetensors
    import safetensors.torch

    for path, projection in zip(files, getattr(head, "projections", ()), strict=True):
        try:
            if path.suffix == ".safetensors":
                state = safetensors.torch.load_file(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
            projection.load_state_dict(state)
        except (OSError, RuntimeError, UnpicklingError, safetensors.SafetensorError) as error:
            raise ArtifactError(f"cannot load the Dense module {str(path)!r}: {error}") from error


def _dense_weights(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise ArtifactError(f"no weights in {str(folder)!r}: expected model.safetensors")


def read_modules(folder: Path) -> Modules:
    """Modules listed in `modules.json`: a transformer, pooling and what follows.

    Raises:
        ArtifactError: others, or settings of them by which a bi-encoder would give other vectors.
    """
    modules = read_json_value(folder / "modules.json")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    own = all(str(module["type"]).startswith("sentence_transformers.") for module in modules)
    normalized = kinds[-1:] == ["Normalize"]
    middle = kinds[2 : len(kinds) - normalized]
    if not own or kinds[:2] != ["Transformer", "Pooling"] or set(middle) - {"Dense"}:
        raise ArtifactError(
            f"{str(folder)!r} consists of the modules {[m['type'] for m in modules]}; supported "
            "are Transformer, Pooling, any number of Dense and Normalize of "
            "sentence-transformers, in this order"
        )
    listed = f"{str(folder / 'modules.json')!r}"
    paths = [
        below(folder, module["path"], listed) if module["path"] else folder for module in modules
    ]
    _check_transformer(paths[0])
    dense = paths[2 : len(paths) - normalized]
    if normalized and (paths[-1] / "config.json").is_file():
        _check_feature(paths[-1] / "config.json", read_json(paths[-1] / "config.json"))
    pooling = _read_pooling(paths[1] / "config.json", projected=bool(dense))
    projections = tuple(_read_dense(path / "config.json") for path in dense)
    return Modules(paths[0], pooling, projections, tuple(map(_dense_weights, dense)), normalized)


def mode_of(pooling: PlainPooling) -> str:
    """Name of a pooling in sentence-transformers."""
    return next(mode for mode, known in _POOLING.items() if known == pooling)


def _read_pooling(path: Path, *, projected: bool) -> PlainPooling:
    settings = read_json(path)
    modes = settings.get("pooling_mode") or [
        POOLING_KEYS.get(key, key)
        for key, value in settings.items()
        if key.startswith("pooling_mode_") and value
    ]
    modes = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
    prompt = settings.get("include_prompt", True)
    pooling = _POOLING.get(modes[0]) if len(modes) == 1 else None
    # The last token is the same with the prompt and without. A mean over the square root of the
    # length has the mean's direction, which is all that is left where no Dense follows.
    if (
        pooling is None
        or not (prompt or isinstance(pooling, EosPooling))
        or (projected and modes == [_SQRT])
    ):
        raise ArtifactError(
            f"{str(path)!r} pools by {modes} with include_prompt={prompt}"
            f"{', a Dense behind it' if projected else ''}; supported is one of {list(_POOLING)}, "
            f"with include_prompt=true unless lasttoken, and {_SQRT!r} without Dense alone"
        )
    return pooling


def _read_dense(path: Path) -> ProjectionConfig:
    settings = read_json(path)
    _check_feature(path, settings)
    # Tanh where none is named, as sentence-transformers has it.
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS or settings.get("use_residual", False):
        raise ArtifactError(
            f"{str(path)!r} has the activation {activation!r} and use_residual="
            f"{settings.get('use_residual', False)}; supported are {sorted(ACTIVATIONS)} without "
            "residual"
        )
    return ProjectionConfig(
        width=settings["out_features"],
        bias=settings.get("bias", True),
        activation=ACTIVATIONS[activation],
    )


def _check_feature(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise for a module that works on anything but the text's vector."""
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, "sentence_embedding"):
            raise ArtifactError(
                f"{str(path)!r} has {key}={settings[key]!r}; supported is 'sentence_embedding'"
            )


def _check_transformer(folder: Path) -> None:
    """Raise for Transformer settings of sentence-transformers that would change the vectors."""
    path = folder / "sentence_bert_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("do_lower_case"):
        raise ArtifactError(f"{str(path)!r} asks for lower-casing outside the tokenizer")
    for key, harmless in _OF_TRANSFORMER.items():
        if key in settings and settings[key] not in harmless:
            raise ArtifactError(
                f"{str(path)!r} has {key}={settings[key]!r}; supported is {harmless[0]!r}"
            )
    if "message" in settings.get("modality_config", {}):
        raise ArtifactError(
            f"{str(path)!r} puts texts into a chat template (modality_config has 'message'); "
            "supported is plain text"
        )


def stated_dtype(transformer: Path) -> Dtype:
    """Number type of a folder with a `config.json`: bfloat16 if that says so, or the first weight
    where it says nothing; else float32.
    """
    config = read_json(transformer / "config.json")
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is None:
        headers = map(read_header, weight_paths(transformer))
        stated = next((tensor["dtype"] for read in headers for tensor in read.values()), None)
    return "bfloat16" if stated in ("BF16", "bfloat16") else "float32"

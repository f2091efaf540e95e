"""Make the initial encoder for training a nomic-moe model, from any supported folder."""

from pathlib import Path
from typing import Any

import torch

from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.errors import ConfigError
from rayembed.models.loading.files import read_json
from rayembed.models.nomic_moe.checkpoint import (
    check_encoder_names,
    filled,
    load_encoder_weights,
    read_weights,
)
from rayembed.models.nomic_moe.config import BalanceConfig, ExpertsConfig, NomicMoeConfig
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.shape import EncoderShape, is_nomic_layout, shape_of
from rayembed.models.nomic_moe.upcycling import (
    INITIALIZER_RANGE,
    rotary_shape,
    rotary_weights,
    upcycled_shape,
    upcycled_weights,
)

PUBLISHED_LENGTH = 512
"""Text length in tokens of the published model's training and evaluation (section 5.3)."""

PUBLISHED_DIMENSION = 256
"""Second embedding width besides the full one (section 4.5)."""


def load_start(folder: Path, config: NomicMoeConfig, dtype: torch.dtype) -> NomicEncoder:
    """Load the initial encoder from a folder; convert a BERT-like model and turn MLPs into experts
    if the settings require it.

    Routers, and experts of the start `random`, are drawn from the global CPU generator. What is
    converted is so in float32; weights that stay as they are get their type one by one.

    Raises:
        ArtifactError: no such model there, or damaged.
        ConfigError: the folder's rotary base or experts are not the settings'.
    """
    settings = read_json(folder / "config.json")
    wanted = start_shape(settings, config, str(folder))
    if not is_nomic_layout(settings):
        dense = rotary_shape(settings, config.rotary_base, str(folder))
        stored = {name: value.float() for name, value in read_weights(folder).items()}
        weights = rotary_weights(stored, dense, str(folder))
    else:
        dense = shape_of(settings, str(folder))
        weights = load_encoder_weights(folder).state_dict()
    if config.experts is not None and dense.num_experts == 0:
        whole = {name: value.float() for name, value in weights.items()}
        std = float(settings.get("initializer_range") or INITIALIZER_RANGE)
        weights = upcycled_weights(whole, wanted, config.experts, initializer_range=std)
    weights = {name: value.to(dtype) for name, value in weights.items()}
    return filled(wanted, weights, str(folder))


def empty_start(folder: Path, config: NomicMoeConfig) -> NomicEncoder:
    """Build the initial encoder on the meta device; raises the same errors as `load_start`, as far
    as names and shapes in safetensors files show them.
    """
    settings = read_json(folder / "config.json")
    encoder = empty_encoder(settings, config, str(folder))
    if is_nomic_layout(settings):
        check_encoder_names(folder, shape_of(settings, str(folder)))
    return encoder


def empty_encoder(settings: dict[str, Any], config: NomicMoeConfig, where: str) -> NomicEncoder:
    """Build the initial encoder on the meta device from the content of a config.json; see
    `empty_start`.
    """
    with torch.device("meta"):
        return NomicEncoder(start_shape(settings, config, where))


def start_shape(settings: dict[str, Any], config: NomicMoeConfig, where: str) -> EncoderShape:
    """Determine the shape of the encoder to train from the start model's config.json and the
    settings.

    Args:
        settings: the content of the start model's config.json.
        where: what to call that in messages.

    Raises:
        ArtifactError: a model that cannot be converted.
        ConfigError: its rotary base or experts are not the settings'.
    """
    if not is_nomic_layout(settings):
        dense = rotary_shape(settings, config.rotary_base, where)
        return dense if config.experts is None else upcycled_shape(dense, config.experts)
    shape = shape_of(settings, where)
    if shape.rotary_base != config.rotary_base:
        raise ConfigError(
            f"model.rotary_base is {config.rotary_base:g}, but {where!r} was trained with "
            f"{shape.rotary_base:g}; set model.rotary_base={shape.rotary_base:g}"
        )
    if shape.num_experts == 0:
        return shape if config.experts is None else upcycled_shape(shape, config.experts)
    _check_experts(shape, config.experts, where)
    return shape


def _check_experts(shape: EncoderShape, experts: ExpertsConfig | None, where: str) -> None:
    found = (shape.num_experts, shape.top_k, shape.moe_every)
    if experts is None or (experts.num_experts, experts.top_k, experts.every) != found:
        raise ConfigError(
            f"{where!r} has {found[0]} experts, {found[1]} of them for each token, in every "
            f"{found[2]}th layer; set model.experts.num_experts={found[0]}, model.experts.top_k="
            f"{found[1]} and model.experts.every={found[2]}"
        )


def loses_its_positions(folder: Path) -> bool:
    """Whether the start model has learnt absolute positions, which conversion to rotary positions
    discards.
    """
    return not is_nomic_layout(read_json(folder / "config.json"))


def is_published_nomic(folder: Path) -> bool:
    """Whether the folder is a copy of nomic-ai/nomic-embed-text-v2-moe or of a related model."""
    path = folder / "config.json"
    settings = read_json(path) if path.is_file() else {}
    return is_nomic_layout(settings) and settings["activation_function"] == "gelu"


def published_nomic_config(folder: Path, dtype: Dtype | None) -> NomicMoeConfig:
    """Make the settings of a published model, whose folder states only the encoder's shape.

    Args:
        dtype: None: as config.json says, which is float32 where it says nothing.

    Raises:
        ArtifactError: it asks for a forward pass that is not computed here.
    """
    settings = read_json(folder / "config.json")
    shape = shape_of(settings, str(folder))
    stated = settings.get("dtype") or settings.get("torch_dtype")
    saved: Dtype = "bfloat16" if stated == "bfloat16" else "float32"
    coefficient = settings.get("router_aux_loss_coef")
    experts = None
    if shape.num_experts:
        experts = ExpertsConfig(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            every=shape.moe_every,
            start="released",
            balance=BalanceConfig(coefficient=1.0 if coefficient is None else float(coefficient)),
        )
    cut = shape.hidden_size > PUBLISHED_DIMENSION
    return NomicMoeConfig(
        backbone=BackboneConfig(path=str(folder), dtype=dtype or saved),
        experts=experts,
        rotary_base=shape.rotary_base,
        dimensions=(PUBLISHED_DIMENSION,) if cut else (),
        query_max_length=PUBLISHED_LENGTH,
        document_max_length=PUBLISHED_LENGTH,
    )

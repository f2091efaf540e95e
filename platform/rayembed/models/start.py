"""Start of a training: a bare transformer, or a model with a trained head."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from rayembed.config.model import (
    BiEncoderConfig,
    Causal2VecConfig,
    CDEConfig,
    ModelConfig,
    NVEmbedConfig,
)
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.export import (
    POOLING_FILE,
    SETTINGS_FILE,
    encoder_folder,
    load_pooling,
    read_settings,
)
from rayembed.models.sentence_folder import load_projections, read_modules

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """Initial weights of a model to train, as found in folders."""

    transformer: Path
    """Folder of the backbone and its tokenizer."""
    load_head: Callable[[nn.Module], None] | None
    """Loads trained weights into the model's head; None for a fresh head."""
    encoder: Path | None = None
    """Folder of the encoder beside the backbone and its tokenizer; None without one."""


def find_start(folders: Path | Mapping[str, Path], config: ModelConfig) -> Start:
    """Locate the initial weights of the config's model; no weights are read.

    The backbone's may be a transformer's own, one of rayembed's models, or in sentence-transformers
    format; so may the encoder's, of which a Causal2Vec gives its encoder.

    Raises:
        ArtifactError: modules or settings that are not supported, or no folder for the encoder.
        ConfigError: projections behind the pooling that are not the config's.
    """
    folder = folders["backbone"] if isinstance(folders, Mapping) else folders
    if (folder / SETTINGS_FILE).is_file():
        start = _of_rayembed(folder, config)
    elif (folder / "modules.json").is_file():
        start = _of_sentence_transformers(folder, config)
    else:
        start = Start(folder, None)
    if not isinstance(config, Causal2VecConfig | CDEConfig) or config.encoder is None:
        return start
    if not isinstance(folders, Mapping) or "encoder" not in folders:
        raise ArtifactError(f"no folder of the encoder {config.encoder.path!r} was given")
    if start.load_head is not None and folders["encoder"] != folder:
        logger.warning(
            "the start model %s has a head that was trained beside its own encoder, and this run "
            "takes another one: its head starts fresh (name the model in model.encoder.path too, "
            "to go on with both)",
            folder,
        )
        start = start._replace(load_head=None)
    return start._replace(encoder=_encoder(folders["encoder"]))


def _encoder(folder: Path) -> Path:
    if (folder / SETTINGS_FILE).is_file():
        return encoder_folder(read_settings(folder), folder) or folder
    return read_modules(folder).transformer if (folder / "modules.json").is_file() else folder


def _of_rayembed(folder: Path, config: ModelConfig) -> Start:
    saved = read_settings(folder)
    if (
        isinstance(saved, NVEmbedConfig)
        and isinstance(config, NVEmbedConfig)
        and saved.token_layout != config.token_layout
    ):
        logger.warning(
            "the start model %s lays its tokens out as model.token_layout=%s, this run as %s",
            *(folder, saved.token_layout, config.token_layout),
        )
    if _head(saved) == _head(config):
        return Start(folder, partial(load_pooling, path=folder / POOLING_FILE))
    logger.warning(
        "the start model %s has the head %s, this run %s: its head starts fresh",
        *(folder, _head(saved), _head(config)),
    )
    return Start(folder, None)


def _head(config: ModelConfig) -> dict[str, object]:
    """Settings that decide the weights of a head."""
    found = config.model_dump(include={"kind", "pooling", "projections"})
    if isinstance(config, Causal2VecConfig):
        found["contextual_tokens"] = config.contextual_tokens
    if isinstance(config, CDEConfig):
        found |= config.model_dump(include={"num_soft_prompts", "output"})
    return found


def _of_sentence_transformers(folder: Path, config: ModelConfig) -> Start:
    modules = read_modules(folder)
    wanted = config.projections if isinstance(config, BiEncoderConfig) else ()
    if modules.projections and modules.projections != wanted:
        raise ConfigError(
            f"{str(folder)!r} has Dense modules behind its pooling, the model to train has "
            f"model.projections={[p.model_dump() for p in wanted]}; set model.projections="
            f"{[p.model_dump() for p in modules.projections]} in a bi-encoder to train them on, or "
            f"copy {str(modules.transformer)!r} without modules.json to start from its transformer"
        )
    if isinstance(config, BiEncoderConfig) and config.pooling != modules.pooling:
        logger.warning(
            "the start model pools by %s, this run by %s (model.pooling.kind)",
            *(modules.pooling.kind, config.pooling.kind),
        )
    load = partial(load_projections, files=modules.dense) if modules.projections else None
    return Start(modules.transformer, load)

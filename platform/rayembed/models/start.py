"""Where a model to train starts: at a transformer alone, or at a model with trained pooling."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from rayembed.config.model import BiEncoderConfig, ModelConfig
from rayembed.errors import ConfigError
from rayembed.models.export import POOLING_FILE, SETTINGS_FILE, load_pooling, read_settings
from rayembed.models.sentence_folder import load_projections, read_modules

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """What a folder gives a model to train."""

    transformer: Path
    """Folder of the transformer and its tokenizer."""
    load_head: Callable[[nn.Module], None] | None
    """Puts trained weights into the model's head; None: it starts fresh."""


def find_start(folder: Path, config: ModelConfig) -> Start:
    """What the folder gives the model of the config; no weights are read.

    It may be a transformer's own, one of rayembed's models, or in sentence-transformers format.

    Raises:
        ArtifactError: modules or settings that are not supported.
        ConfigError: projections behind the pooling that are not the config's.
    """
    if (folder / SETTINGS_FILE).is_file():
        return _of_rayembed(folder, config)
    if (folder / "modules.json").is_file():
        return _of_sentence_transformers(folder, config)
    return Start(folder, None)


def _of_rayembed(folder: Path, config: ModelConfig) -> Start:
    saved = read_settings(folder)
    if _head(saved) == _head(config):
        return Start(folder, partial(load_pooling, path=folder / POOLING_FILE))
    logger.warning(
        "the start model %s has the head %s, this run %s: its pooling starts fresh",
        *(folder, _head(saved), _head(config)),
    )
    return Start(folder, None)


def _head(config: ModelConfig) -> dict[str, object]:
    """The settings that decide which weights a head has."""
    return config.model_dump(include={"kind", "pooling", "projections"})


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

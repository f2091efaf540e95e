"""Locate the initial weights of a training: a plain transformer, or a model with a trained head."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from rayembed.assets.folder_formats import stated_format
from rayembed.config.model import ModelConfig
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.architecture import architecture_of
from rayembed.models.loading.saved_folder import (
    POOLING_FILE,
    SETTINGS_FILE,
    load_head,
    part_folder,
    part_folders,
    read_settings,
)
from rayembed.models.loading.sentence_folder import load_projections, read_modules

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """Initial weights of a model to train: the folders of its parts, and a function that loads a
    trained head.
    """

    folders: dict[str, Path]
    """Folders of the pretrained parts, each with its tokenizer, by setting."""
    load_head: Callable[[nn.Module], None] | None
    """Function that loads trained weights into the model's head; None for a fresh head."""

    @property
    def transformer(self) -> Path:
        """Folder of the backbone."""
        return self.folders["backbone"]


def find_start(folders: Path | Mapping[str, Path], config: ModelConfig) -> Start:
    """Locate the initial weights of the model to train, without reading them.

    The backbone's may be a transformer's own, one of rayembed's models, or in sentence-transformers
    format; so may those of further parts, of which a saved model gives the part of the same name.

    Raises:
        ArtifactError: modules or settings that are not supported, or no folder for a part.
        ConfigError: projections behind the pooling that are not the config's; or a model
            without weights for torch.
    """
    folder = folders["backbone"] if isinstance(folders, Mapping) else folders
    check_trainable(folder)
    if (folder / SETTINGS_FILE).is_file():
        start = _of_rayembed(folder, config)
    elif (folder / "modules.json").is_file():
        start = _of_sentence_transformers(folder, config)
    else:
        start = Start({"backbone": folder}, None)
    remark = architecture_of(config).remark_on_start(config, folder, start.transformer)
    if remark is not None:
        logger.warning("%s", remark)
    for name, reference in config.parts.items():
        if name == "backbone":
            continue
        if not isinstance(folders, Mapping) or name not in folders:
            raise ArtifactError(f"no folder was given for the {name} {reference!r}")
        if start.load_head is not None and folders[name] != folder:
            logger.warning(
                "the head of the start model %s was trained with its own %s, but this run uses "
                "another one, so the head is initialised randomly (to keep both, name the start "
                "model in model.%s.path too)",
                *(folder, name, name),
            )
            start = start._replace(load_head=None)
        start.folders[name] = part_within(folders[name], name)
    return start


def check_trainable(folder: Path) -> None:
    """Raise ConfigError if a start model has no weights that torch can train."""
    if (name := stated_format(folder)) is not None:
        raise ConfigError(
            f"{str(folder)!r} is a model in the format {name!r} without weights that can be "
            "trained or changed; use the model that it was exported from"
        )


def part_within(folder: Path, name: str) -> Path:
    """Return the folder of a named part within a model's folder, or the folder itself if it is a
    plain transformer.
    """
    check_trainable(folder)
    if (folder / SETTINGS_FILE).is_file():
        return part_folders(read_settings(folder), folder).get(name, folder)
    return read_modules(folder).transformer if (folder / "modules.json").is_file() else folder


def _of_rayembed(folder: Path, config: ModelConfig) -> Start:
    saved = read_settings(folder)
    backbone = {"backbone": part_folder(folder, "backbone")}
    if saved.head_settings == config.head_settings:
        load = partial(load_head, path=folder / POOLING_FILE)
        return Start(backbone, load)
    logger.warning(
        "the start model %s has the head %s, but this run has %s, so its head is initialised "
        "randomly",
        *(folder, saved.head_settings, config.head_settings),
    )
    return Start(backbone, None)


def _of_sentence_transformers(folder: Path, config: ModelConfig) -> Start:
    modules = read_modules(folder)
    wanted = architecture_of(config).projections(config)
    if modules.projections and modules.projections != wanted:
        raise ConfigError(
            f"{str(folder)!r} has Dense modules after its pooling, but the model to train has "
            f"model.projections={[p.model_dump() for p in wanted]}; set "
            f"model.projections={[p.model_dump() for p in modules.projections]} in a bi-encoder "
            f"to keep training them, or copy {str(modules.transformer)!r} without modules.json to "
            "start from its transformer"
        )
    load = partial(load_projections, files=modules.dense) if modules.projections else None
    return Start({"backbone": modules.transformer}, load)

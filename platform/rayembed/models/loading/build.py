"""Build models from settings: pretrained parts, a head, new adapters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rayembed.config.model import ModelConfig
from rayembed.machine.hardware import settled
from rayembed.models.adapters.lora import add_lora
from rayembed.models.architecture import Parts, architecture_of
from rayembed.models.contract import PromptTokenizer
from rayembed.models.kept_zeros import keep_zeros
from rayembed.models.loading.backbones import check_not_quantised, torch_dtype
from rayembed.models.loading.start import find_start
from rayembed.models.transformer_model import TransformerModel
from rayembed.models.vocabulary import check_words

Folders = Path | Mapping[str, Path]
"""Folder of the backbone, or of each pretrained part by its setting (`backbone`, `encoder`)."""


def build_model(config: ModelConfig, folders: Folders, *, seed: int) -> TransformerModel:
    """Build the model to train from pretrained parts, a head and new adapters; it is in training
    mode.

    The head is fresh too, unless the backbone's folder has a trained one of the same kind (see
    `start`). Everything is in the config's dtype, on the CPU; the model's own settings name it. The
    same seed gives the same weights whatever the state of the random generators, and leaves that
    state as it was.

    Raises:
        ArtifactError: no usable model or tokenizer in a folder.
        ConfigError: settings that do not fit a pretrained part.
    """
    backbone = config.backbone.model_copy(update={"dtype": settled(config.backbone.dtype)})
    config = config.model_copy(update={"backbone": backbone})
    architecture = architecture_of(config)
    start = find_start(folders, config)
    tokenizer = architecture.tokenizer(config, start.folders)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed GPUs too, and their state is not put back.
        torch.default_generator.manual_seed(seed)
        parts = {
            name: architecture.load_part(config, name, folder)
            for name, folder in start.folders.items()
        }
        check_not_quantised(parts)
        architecture.check_parts(config, parts, start.folders)
        head = architecture.build_head(config, shapes_of(parts))
        if start.load_head is not None:
            start.load_head(head)
        head.to(torch_dtype(config.backbone.dtype))
        if start.load_head is None:
            architecture.start_head(config, head, parts)
        choose_trained(config, parts)
    model: TransformerModel = architecture.assemble(config, parts, head, tokenizer)
    check_words(model)
    if config.keep_zeros:
        keep_zeros(model, folders, head=start.load_head is not None)
    return model.train()


def check_buildable(config: ModelConfig, folders: Folders) -> TransformerModel:
    """Check that `build_model` can succeed, without reading weights; return the model on the meta
    device.

    Raises:
        ArtifactError: no usable model or tokenizer in a folder.
        ConfigError: settings that do not fit a pretrained part.
    """
    architecture = architecture_of(config)
    start = find_start(folders, config)
    tokenizer = architecture.tokenizer(config, start.folders)
    parts = empty_parts(config, start.folders)
    check_not_quantised(parts)
    architecture.check_parts(config, parts, start.folders)
    architecture.check_lengths(config, parts)
    with torch.device("meta"):
        choose_trained(config, parts)
    model = empty_around(config, parts, tokenizer)
    check_words(model)
    if config.keep_zeros:
        keep_zeros(model, folders, head=start.load_head is not None)
    return model


def empty_parts(config: ModelConfig, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Build the pretrained parts on the meta device."""
    architecture = architecture_of(config)
    return {name: architecture.empty_part(config, name, at) for name, at in folders.items()}


def empty_around(config: ModelConfig, parts: Parts, tokenizer: PromptTokenizer) -> TransformerModel:
    """Build the model from given parts, with a head on the meta device."""
    architecture = architecture_of(config)
    with torch.device("meta"):
        head = architecture.build_head(config, shapes_of(parts))
        model: TransformerModel = architecture.assemble(config, parts, head, tokenizer)
    return model


def shapes_of(parts: Parts) -> dict[str, Any]:
    """Return each part's transformers configuration by the part's name."""
    return {name: part.config for name, part in parts.items()}


def choose_trained(config: ModelConfig, parts: Parts) -> None:
    """Add adapters to the parts, and freeze the parts that are not trained, in place."""
    for name, part in parts.items():
        if name in config.frozen:
            part.requires_grad_(False)
        elif name in config.adapters:
            adapters = config.adapters[name]
            add_lora(part, adapters.config, setting=adapters.setting)

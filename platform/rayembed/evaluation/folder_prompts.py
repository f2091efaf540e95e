"""Prompts of a model's folder, read without its weights, or of its settings."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayembed.config.model import ModelConfig
from rayembed.config.types import Role
from rayembed.evaluation.prompts import FolderPrompts
from rayembed.models.files import read_json
from rayembed.models.saved_folder import SETTINGS_FILE
from rayembed.models.saved_prompts import prompts_to_save, saved_prompts


def folder_prompts(folder: Path, config: ModelConfig) -> FolderPrompts:
    """The prompts of a folder that `load_model` takes.

    Args:
        config: what `check_loadable` gives for the folder.
    """
    if (folder / SETTINGS_FILE).is_file():
        return replace(_of_config(config), named=saved_prompts(folder))
    path = folder / "config_sentence_transformers.json"
    stated: dict[str, Any] = read_json(path) if path.is_file() else {}
    return replace(
        _of_config(config),
        named={name: text for name, text in (stated.get("prompts") or {}).items() if text},
        default_name=stated.get("default_prompt_name"),
        own=False,
    )


def unsaved_prompts(
    config: ModelConfig,
    instructions: Mapping[str, str],
    defaults: Mapping[Role, str] = MappingProxyType({}),
) -> FolderPrompts:
    """The prompts of a model of ours that lies in no folder, as its folder would have them.

    Args:
        instructions: those that it would be saved with.
        defaults: its instructions by role, of texts for which nobody names one.

    Raises:
        ConfigError: an instruction has a role's name.
    """
    return replace(_of_config(config), named=prompts_to_save(config, instructions, defaults))


def _of_config(config: ModelConfig) -> FolderPrompts:
    template, prefixes = config.template, config.prefixes
    if prefixes:
        return FolderPrompts(config.prompt_table, None, prefixes, in_place=template)
    return FolderPrompts(config.prompt_table, template)

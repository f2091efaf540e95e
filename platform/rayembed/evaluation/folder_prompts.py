"""What a model's folder says of prompts, read without its weights."""

from pathlib import Path
from typing import Any

from rayembed.config.model import ModelConfig
from rayembed.evaluation.prompts import FolderPrompts
from rayembed.models.contract import Role
from rayembed.models.export import SETTINGS_FILE
from rayembed.models.json_file import read_json


def folder_prompts(folder: Path, config: ModelConfig) -> FolderPrompts:
    """The prompts of a folder that `load_model` takes.

    Args:
        config: what `check_loadable` gives for the folder.
    """
    path = folder / "config_sentence_transformers.json"
    stated: dict[str, Any] = read_json(path) if path.is_file() else {}
    named = {name: text for name, text in (stated.get("prompts") or {}).items() if text}
    default = stated.get("default_prompt_name")
    # An instruction of CDE is a prefix itself, in place of the role's.
    template = None if config.kind == "cde" else getattr(config, "instruction_template", None)
    own = (folder / SETTINGS_FILE).is_file()
    prefixes: dict[Role, str] = {}
    if template is None:
        for role in ("query", "document"):
            prefixes[role] = getattr(config, f"{role}_prefix", "")
    return FolderPrompts(
        kind=config.kind,
        template=template,
        prefixes=prefixes,
        named=named,
        default_name=default,
        own=own,
    )

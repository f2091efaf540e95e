"""Write and read the literal prompts in a saved model's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from rayembed.config.instructions import check_prompt_names, instruction_in
from rayembed.config.model import ModelConfig
from rayembed.config.types import Role
from rayembed.models.loading.files import read_json

SYMMETRIC_TYPES = (
    "BitextMining",
    "Classification",
    "Clustering",
    "MultilabelClassification",
    "PairClassification",
    "Regression",
    "STS",
    "Summarization",
)
"""mteb's symmetric task types, whose texts are neither queries nor documents."""


def prompts_to_save(
    config: ModelConfig, instructions: Mapping[str, str], defaults: Mapping[Role, str]
) -> dict[str, str]:
    """Collect the literal prompts to write for sentence-transformers and mteb: by role, data set,
    task name and task type.

    mteb asks for a task, then for its type, then for the role; what a task has no sides for has no
    role. With a prefix of queries the types of such tasks name it, so that mteb gives their texts
    the prefix that they have here. A bare name would hit documents too, which have their own.

    Args:
        instructions: task definitions by name.
        defaults: instructions by role, of texts for which nobody names one.

    Raises:
        ConfigError: an instruction has a role's name.
    """
    check_prompt_names(instructions)
    document = config.prompt(defaults.get("document", ""), "document")
    prefix = config.prompt("")
    types = dict.fromkeys(SYMMETRIC_TYPES, prefix) if prefix else {}
    named = types | {name: config.prompt(text) for name, text in instructions.items()}
    documents = {f"{name}-document": document for name, text in named.items() if text != document}
    by_role = {"query": config.prompt(defaults.get("query", "")), "document": document}
    return {**by_role, **documents, **named}


def given_prompts(prompts: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Select the saved prompts that come from configured instructions, leaving out
    defaults.

    Args:
        prompts: all of them, see `prompts_to_save`.
        prefix: text before queries without an instruction; a task type that names no more says
            nothing of its own.
    """
    others = set(get_args(Role))
    if prefix:
        others |= {name for name in SYMMETRIC_TYPES if prompts.get(name) == prefix}
    documents = {f"{name}-document" for name in prompts}
    others |= {name for name in documents if prompts.get(name) == prompts.get("document")}
    return {name: text for name, text in prompts.items() if name not in others}


def sentence_settings(folder: Path) -> dict[str, Any]:
    """Read a folder's config_sentence_transformers.json; empty if the folder has none."""
    path = folder / "config_sentence_transformers.json"
    return read_json(path) if path.is_file() else {}


def saved_prompts(folder: Path) -> dict[str, str]:
    """Read all literal prompts of a saved model, by name."""
    prompts: dict[str, str | None] = sentence_settings(folder).get("prompts") or {}
    return {name: text or "" for name, text in prompts.items()}


def saved_instructions(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Read the instructions with which a model was saved, by name, in the form that `save`
    accepts.

    Args:
        config: the model's settings, which made the folder's prompts of them.
    """
    prefix = config.prompt("")
    given = given_prompts(saved_prompts(folder), prefix)
    if config.template is None:
        return {name: text.removeprefix(prefix) for name, text in given.items()}
    return {name: instruction_in(text, config.template) for name, text in given.items()}

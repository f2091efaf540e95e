"""Read settings, prompts and vector widths of a saved model's folder, and load its head."""

from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import TypeAdapter, ValidationError

from rayembed.config.backbone import Dtype
from rayembed.config.model import ModelConfig
from rayembed.config.types import Role
from rayembed.errors import ArtifactError
from rayembed.models.loading.files import read_json

SETTINGS_FILE = "rayembed.json"
MODEL_TYPE = "rayembed"
"""`model_type` in config.json of what transformers must not take for its backbone alone."""
POOLING_FILE = "pooling.safetensors"
FORMAT_VERSION = 2
"""Version of the layout of a saved model's folder."""


def part_folders(config: ModelConfig, folder: Path) -> dict[str, Path]:
    """Return the folder of each pretrained part of a saved model."""
    return {name: part_folder(folder, name) for name in config.parts}


def part_folder(folder: Path, name: str) -> Path:
    """Return the folder of one pretrained part of a saved model.

    The backbone lies in the model's folder itself in plain formats.
    """
    own = folder / name
    return own if name != "backbone" or own.is_dir() else folder


def read_settings(folder: Path, *, dtype: Dtype | None = None) -> ModelConfig:
    """Read the settings of a saved model.

    Raises:
        ArtifactError: not a settings file, or of a later format.
    """
    values = _read_settings_file(folder / SETTINGS_FILE)
    adapter: TypeAdapter[Any] = TypeAdapter(ModelConfig)
    try:
        config: ModelConfig = adapter.validate_python(values.get("model"))
    except ValidationError as error:
        raise ArtifactError(f"the settings in {str(folder)!r} are invalid: {error}") from error
    if dtype is None:
        return config
    backbone = config.backbone.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"backbone": backbone})


def default_instructions(folder: Path) -> dict[Role, str]:
    """Read a saved model's default instruction for each role: set if all its training data had the
    same one.
    """
    told = _read_settings_file(folder / SETTINGS_FILE).get("default_instructions") or {}
    return {role: str(told[role]) for role in get_args(Role) if role in told}


def saved_dimensions(settings_file: Path) -> tuple[int, ...]:
    """Read the vector widths of a saved model, the full width first, without loading the
    model.

    Args:
        settings_file: the `rayembed.json` of the model's folder.

    Raises:
        ArtifactError: not a settings file, or of another format.
    """
    found = _read_settings_file(settings_file).get("dimensions")
    if not isinstance(found, list) or not found or not all(isinstance(d, int) for d in found):
        raise ArtifactError(
            f"{str(settings_file)!r} has no list of vector widths (dimensions = {found!r}); "
            "export the model again"
        )
    return tuple(found)


def _read_settings_file(path: Path) -> dict[str, Any]:
    values = read_json(path)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{str(path)!r} has format_version {version!r}, but this version of rayembed reads "
            f"only {FORMAT_VERSION}; install the version of rayembed that wrote it"
        )
    return values


def load_head(head: Any, path: Path, dtype: torch.dtype | None = None) -> None:
    """Load saved weights into a model's head; do nothing for a head without weights.

    Args:
        dtype: of a head on the meta device, which gets copies of the weights in this type, one by
            one; None: the head has memory of its own.

    Raises:
        ArtifactError: the file is missing, damaged or of another layer.
    """
    import safetensors
    import safetensors.torch

    if not head.state_dict():
        return
    try:
        state = safetensors.torch.load_file(path)
        if dtype is not None:
            # Copied in any case: the file that they are mapped from may be written anew.
            state = {
                name: value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
                for name, value in state.items()
            }
        head.load_state_dict(state, assign=dtype is not None)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot load the head {str(path)!r}: {error}") from error

"""Sizes of models, counted once on a machine: counting imports torch and transformers."""

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rayembed.assets.cache import cache_folder, filled
from rayembed.config.document import fingerprint
from rayembed.config.model import ModelConfig
from rayembed.pipeline.estimate.requirements import (
    Activations,
    ModelSize,
    known_settings,
    model_size,
)

_FILE = "counted.json"
_CODE = 3
"""Version of what counts; raise it when the same model has other counts."""


def remembered_size(model: ModelConfig) -> ModelSize | None:
    """Numbers of parameters, as `model_size` counts them; those of a model of the same settings and
    shapes are read from this machine's cache, if it has one: a dry run makes no folder.

    Raises:
        ConfigError: as `model_size`; nothing is kept then.
    """
    values = _remembered(model, "size", model_size)
    return None if values is None else ModelSize(**values)


def remembered_activations(model: ModelConfig) -> Activations | None:
    """Bytes of a token's activations, as `activations` counts them; kept as sizes are.

    Raises:
        ConfigError: as `model_size`; nothing is kept then.
    """

    def count(model: ModelConfig) -> Any:
        from rayembed.pipeline.estimate.activations import activations

        return activations(model)

    values = _remembered(model, "activations", count)
    return None if values is None else Activations(**values)


def _remembered(
    model: ModelConfig, what: str, count: Callable[[ModelConfig], Any]
) -> dict[str, Any] | None:
    """Fields of what is counted, from the cache where they are there."""
    shapes = {name: known_settings(at, f"model.{name}.path") for name, at in model.parts.items()}
    if None in shapes.values():
        return None
    if not cache_folder().is_dir():
        found = count(model)
        return None if found is None else asdict(found)
    versions = [version(name) for name in ("rayembed", "transformers", "torch")]
    built = [_CODE, what, *versions, model.model_dump(mode="json"), shapes]

    def fill(folder: Path) -> None:
        found = count(model)
        (folder / _FILE).write_text(json.dumps(None if found is None else asdict(found)))

    folder = filled(cache_folder() / "sizes" / fingerprint(built), fill)
    values: dict[str, Any] | None = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return values

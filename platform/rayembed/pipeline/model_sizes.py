"""Sizes of models, counted once on a machine: counting imports torch and transformers."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rayembed.assets.cache import cache_folder, filled
from rayembed.config.document import fingerprint
from rayembed.config.model import ModelConfig
from rayembed.pipeline.requirements import ModelSize, known_settings, model_size

_FILE = "size.json"


def remembered_size(model: ModelConfig) -> ModelSize | None:
    """Numbers of parameters, as `model_size` counts them; those of a model of the same settings and
    shapes are read from this machine's cache, if it has one: a dry run makes no folder.

    Raises:
        ConfigError: as `model_size`; nothing is kept then.
    """
    shapes = {name: known_settings(at, f"model.{name}.path") for name, at in model.parts.items()}
    if None in shapes.values():
        return None
    if not cache_folder().is_dir():
        return model_size(model)
    built = [version("rayembed"), version("transformers"), model.model_dump(mode="json"), shapes]

    def fill(folder: Path) -> None:
        size = model_size(model)
        (folder / _FILE).write_text(json.dumps(None if size is None else asdict(size)))

    folder = filled(cache_folder() / "sizes" / fingerprint(built), fill)
    values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return None if values is None else ModelSize(**values)

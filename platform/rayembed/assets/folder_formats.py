"""Table of formats for model folders without torch weights, each loaded by the package that defines
it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayembed.config.table import NamedTable
from rayembed.errors import ArtifactError, ConfigError

PROOF_FOLDER = "proof"
"""Folder of a model's proof, which names its weights and therefore does not count among them."""


@dataclass(frozen=True)
class FolderFormat:
    """Loading functions for model folders of one format."""

    load: Callable[[Path], Any]
    """Function that loads the model, a `TransformerModel` in evaluation mode; raises ArtifactError
    where files are missing or damaged, ConfigError where a package is not installed."""
    check: Callable[[Path], object]
    """Function that raises ArtifactError where files are missing; loads nothing."""
    packages: Callable[[Path], tuple[str, ...]]
    """Function that returns the packages that loading a folder needs in addition to the common
    ones."""


FORMATS = NamedTable("rayembed.folder_formats", FolderFormat, "format of model folders", {})


def stated_format(folder: Path) -> str | None:
    """Read the format name in a saved model's `rayembed.json`; None means ordinary torch
    weights.

    Raises:
        ArtifactError: its settings cannot be read.
    """
    path = folder / "rayembed.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{str(path)!r} must hold a JSON object")
    return values.get("format")


def format_of(folder: Path) -> FolderFormat | None:
    """Look up the loading functions for a saved model's format; None means ordinary torch
    weights.

    Raises:
        ArtifactError: its settings cannot be read.
        ConfigError: no package that is installed reads the format.
    """
    name = stated_format(folder)
    formats = {} if name is None else FORMATS.members()
    if name is not None and name not in formats:
        raise ConfigError(
            f"{str(folder)!r} is a model in the format {name!r}, which no installed package can "
            "load. For the format 'graph', rayembed_extras/compression and its packages must be "
            "installed: in the checkout, pip install '.[compress]'"
        )
    return None if name is None else formats[name]

"""What a folder of a compressed model says of how it was made: `compression.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayembed.models.loading.files import read_json, write_json

COMPRESSION_FILE = "compression.json"
"""Way and settings (`settings`), numbers of weights (`weights`, `compressed`, `by_part`), names of
pruned matrices (`matrices`) and, of a model that was compressed twice, the same of the first time
(`before`)."""


def write_compression(folder: Path, told: Mapping[str, Any]) -> None:
    """Write how the model in a folder was compressed."""
    write_json(folder / COMPRESSION_FILE, dict(told))


def read_compression(folder: Path) -> dict[str, Any] | None:
    """How the model in a folder was compressed; None: it was not.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / COMPRESSION_FILE
    return read_json(path) if path.is_file() else None

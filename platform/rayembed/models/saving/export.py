"""Create a model folder atomically: write to a temporary folder, then move it."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayembed.assets.atomic import room_for
from rayembed.errors import ArtifactError
from rayembed.models.loading.files import read_json, write_json
from rayembed.models.loading.saved_folder import SETTINGS_FILE


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary path for a model, which is moved to `output` at the end, or removed after
    an error.

    Raises:
        ArtifactError: the folder `output` holds something else than a model of rayembed.
        StorageFullError: there is no room for the model.
    """
    output = check_target(output)
    with room_for(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            yield temporary / "model"
            if output.exists():
                output.rename(temporary / "replaced")
            (temporary / "model").rename(output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_target(folder: Path) -> Path:
    """Check that a model may be saved to the folder, and return its absolute path.

    Raises:
        ArtifactError: it holds something else than a model of rayembed.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"cannot save to {str(folder)!r}: it is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS_FILE).is_file():
        raise ArtifactError(
            f"cannot save to {str(folder)!r}: it contains files that are not a model; "
            "name a new folder"
        )
    return folder


COMPRESSION_FILE = "compression.json"
"""Way and settings (`settings`), numbers of weights (`weights`, `compressed`, `by_part`), names of
pruned matrices (`matrices`) and, of a model that was compressed twice, the same of the first time
(`before`)."""


def write_compression(folder: Path, told: Mapping[str, Any]) -> None:
    """Write a record of how the model in a folder was compressed."""
    write_json(folder / COMPRESSION_FILE, dict(told))


def read_compression(folder: Path) -> dict[str, Any] | None:
    """Read the record of how the model in a folder was compressed; None if it was not.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / COMPRESSION_FILE
    return read_json(path) if path.is_file() else None

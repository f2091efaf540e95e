"""JSON objects of model folders."""

import json
from pathlib import Path
from typing import Any

from rayembed.errors import ArtifactError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ArtifactError: no such file, not JSON, or not an object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{str(path)!r} must hold a JSON object, found {type(value).__name__}")
    return value


def read_json_value(path: Path) -> Any:
    """Read a JSON value from a file.

    Raises:
        ArtifactError: no such file or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {str(path)!r}: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

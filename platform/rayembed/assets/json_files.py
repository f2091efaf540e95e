"""JSON files whose last entry, `digest`, is a checksum of their content.

A flipped bit in a digit or a name would otherwise be read as another number or name. What counts is
the content: white space and the order of entries may change.
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from rayembed.assets.storage import read_bytes, write_atomic
from rayembed.errors import ArtifactError

DIGEST = "digest"


def write_json(path: str, values: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write an object as JSON with a digest; raises the same errors as `write_atomic`."""
    plain = json.loads(json.dumps(values))
    content = json.dumps({**plain, DIGEST: _digest(plain)}, indent=indent, ensure_ascii=False)
    write_atomic(path, content.encode())


def read_json(path: str, remedy: str) -> dict[str, Any]:
    """Read an object written by `write_json`, check its digest, and return it without the
    digest.

    Args:
        remedy: what to do where the file is missing or broken, a whole sentence.

    Raises:
        ArtifactError: the file is missing, or not what was written.
        StorageError: the storage does not give it.
    """
    content = read_bytes(path, remedy)
    try:
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError("the file must contain a JSON object")
        digest = values.pop(DIGEST, None)
        if digest is None:
            raise ValueError(
                "the entry `digest`, the checksum that rayembed writes into each JSON file, is "
                "missing, so another program wrote the file"
            )
        if digest != _digest(values):
            raise ValueError(
                "the checksum `digest` does not match the content, which has changed since the "
                "file was written"
            )
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the file {path!r} is broken: {error}. {remedy}") from error
    return values


def _digest(values: Mapping[str, Any]) -> str:
    plain = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(plain.encode())

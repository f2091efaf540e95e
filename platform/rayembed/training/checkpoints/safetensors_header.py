"""Headers of safetensors files in storage, read without their tensors."""

import json

import pyarrow

from rayembed.assets.clients import asked_again
from rayembed.assets.storage import open_storage, unreadable
from rayembed.errors import ArtifactError

_LENGTH_BYTES = 8
"""Length of the field with which a file begins: the header's size."""

_LONGEST = 100_000_000
"""Maximum header size in bytes, the limit of safetensors itself."""


def read_header(path: str) -> dict[str, str]:
    """Metadata of a file whose size matches its header; tensors are not read.

    Raises:
        ArtifactError: there is no such file, it is none of safetensors, or it was cut off.
        StorageError: the storage does not give it.
    """
    filesystem, inside = open_storage(path)

    def read() -> tuple[int, int, bytes]:
        with filesystem.open_input_file(inside) as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            return file.size(), length, file.read(min(length, _LONGEST))

    try:
        there, length, content = asked_again(read)
        header = json.loads(content)
        metadata: dict[str, str] = header.pop("__metadata__", {})
        tensors = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (OSError, pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise unreadable(error)(f"{path!r} cannot be read: {error!r}") from error
    expected = _LENGTH_BYTES + length + tensors
    if there != expected:
        raise ArtifactError(f"{path!r} has {there:,} of {expected:,} bytes")
    return metadata

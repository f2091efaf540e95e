"""Store a stage's trained weights as one safetensors file, with a record of their inputs."""

import json
from collections.abc import Mapping

import pyarrow
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from rayembed.assets.clients import read_with_retries
from rayembed.assets.finite import check_finite
from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import open_storage, read_bytes, unreadable, write_atomic
from rayembed.config.run import Run
from rayembed.errors import ArtifactError, StorageError
from rayembed.models.contract import EmbeddingModel, load_trainable_state
from rayembed.models.loading.build import build_model

_CONTENT = "content"


def write_weights(path: str, state: dict[str, Tensor], made_of: Mapping[str, str]) -> None:
    """Write weights to a file whose header contains a record of their inputs and a digest of the
    tensors.

    Raises:
        ArtifactError: a weight is not finite.
        StorageError: as `write_atomic`.
    """
    check_finite(state.items(), f"the weights {path!r}")
    metadata = {**made_of, _CONTENT: tensors_digest(state)}
    write_atomic(path, safetensors.torch.save(state, metadata=metadata))


def tensors_digest(state: Mapping[str, Tensor]) -> str:
    """Compute a digest of CPU tensors and their names: twelve hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def read_made_of(path: str) -> dict[str, str]:
    """Read the record of a weight file's inputs from its header.

    Raises:
        ArtifactError: there is no such file, or it is not one of `write_weights`.
        StorageError: the storage does not give it.
    """
    try:
        found = read_header(path)
        if _CONTENT not in found:
            raise ArtifactError("its header has no record of its inputs")
    except StorageError:
        raise
    except ArtifactError as error:
        raise ArtifactError(
            f"{path!r} does not hold the weights of a training stage ({error}); remove the "
            "file to train the stage again"
        ) from error
    return found


def check_made_of(path: str, wanted: Mapping[str, str]) -> None:
    """Raise unless the weights in storage were made from the inputs that this run expects.

    Raises:
        ArtifactError: they were made of something else.
    """
    found = read_made_of(path)
    if {name: found.get(name) for name in wanted} != wanted:
        raise ArtifactError(
            f"the weights {path!r} were made from {found}, but this run would make them "
            f"from {wanted}: settings, data or the previous stage have changed since. "
            "Restore the former settings and data, give this run another --name, or remove "
            "the stage's folder."
        )


def weights_digest(path: str) -> str:
    """Read the digest of a weight file's tensors from its header; twelve hexadecimal digits."""
    return read_made_of(path)[_CONTENT]


def load_weights(run: Run, weights: str | None) -> EmbeddingModel:
    """Build the run's model on the CPU and load trained weights from storage; None leaves it
    untrained.

    Raises:
        RayembedError: a pretrained part or the weights cannot be had or do not fit.
    """
    folders = {name: resolve_model(at) for name, at in run.model.parts.items()}
    model = build_model(run.model, folders, seed=run.seed)
    if weights is not None:
        load_trainable_state(model, read_weights(weights))
    return model


def read_weights(path: str) -> dict[str, Tensor]:
    """Read all tensors of a file that `write_weights` wrote, by name, and check their
    digest.

    Raises:
        ArtifactError: there is no such file, or it is not what was written.
        StorageError: the storage does not give it.
    """
    content = weights_digest(path)
    try:
        state = safetensors.torch.load(read_bytes(path))
        if (seen := tensors_digest(state)) != content:
            raise ValueError(
                f"their header states the digest {content}, but the tensors have the digest {seen}"
            )
    except (ValueError, SafetensorError) as error:
        raise ArtifactError(
            f"the weights {path!r} are broken: {error}; remove the file to train the stage again"
        ) from error
    return state


_LENGTH_BYTES = 8
"""Length of the field with which a file begins: the header's size."""

_LONGEST = 100_000_000
"""Maximum header size in bytes, the limit of safetensors itself."""


def read_header(path: str) -> dict[str, str]:
    """Read a weight file's metadata, and check that the file has the size that its header
    states.

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
        there, length, content = read_with_retries(read)
        header = json.loads(content)
        metadata: dict[str, str] = header.pop("__metadata__", {})
        tensors = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (OSError, pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise unreadable(error)(f"{path!r} cannot be read: {error!r}") from error
    expected = _LENGTH_BYTES + length + tensors
    if there != expected:
        raise ArtifactError(
            f"{path!r} is cut off: it has {there:,} of the {expected:,} bytes that its header "
            "states"
        )
    return metadata

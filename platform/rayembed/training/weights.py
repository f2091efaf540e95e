"""Trained weights of a stage as one safetensors file in storage, which says what it was made of."""

import hashlib
import json
from collections.abc import Mapping

import pyarrow
import safetensors.torch
import torch
from torch import Tensor

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import open_storage, read_bytes, write_atomic
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.models.build import build_model
from rayembed.models.contract import EmbeddingModel
from rayembed.models.trainable import load_trainable_state

_CONTENT = "content"


def write_weights(path: str, state: dict[str, Tensor], made_of: Mapping[str, str]) -> None:
    """Write a file whose header holds what it was made of and a digest of its tensors."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().flatten().view(torch.uint8).numpy().data)
    metadata = {**made_of, _CONTENT: digest.hexdigest()[:12]}
    write_atomic(path, safetensors.torch.save(state, metadata=metadata))


def read_made_of(path: str) -> dict[str, str]:
    """What a file of weights was made of; only its header is read.

    Raises:
        ArtifactError: there is no such file, or it is not one of `write_weights`.
    """
    filesystem, inside = open_storage(path)
    try:
        with filesystem.open_input_file(inside) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100_000_000)))
            found: dict[str, str] = header["__metadata__"]
            found[_CONTENT]
    except (OSError, pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path!r} holds no weights of a stage ({error!r}); remove it to train the stage again"
        ) from error
    return found


def weights_content(path: str) -> str:
    """Twelve hexadecimal digits of the tensors in a file of weights, from its header."""
    return read_made_of(path)[_CONTENT]


def load_weights(run: Run, weights: str | None) -> EmbeddingModel:
    """The run's model on the CPU with trained weights from storage, or untrained for None.

    Raises:
        RayembedError: the backbone or the weights cannot be had or do not fit.
    """
    model = build_model(run.model, resolve_model(run.model.backbone.path), seed=run.seed)
    if weights is not None:
        load_trainable_state(model, safetensors.torch.load(read_bytes(weights)))
    return model

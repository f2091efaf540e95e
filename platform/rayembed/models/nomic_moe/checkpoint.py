"""Read, check and load NomicBert weights under their published names."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rayembed.errors import ArtifactError
from rayembed.models.loading.files import load_weights, read_header, weight_paths
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.shape import EncoderShape, read_shape


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Load all weights of a folder by name.

    Raises:
        ArtifactError: none there, or damaged ones.
    """
    paths = weight_paths(folder) or [folder / "pytorch_model.bin"]
    return {name: value for path in paths for name, value in load_weights(path).items()}


def load_encoder_weights(folder: Path) -> NomicEncoder:
    """Load an encoder from a folder in its published layout, in its weights' dtype, on the CPU.

    Raises:
        ArtifactError: settings that are not computed here, or weights of other names or shapes.
    """
    stored = read_weights(folder)
    weights = {own: stored[name] for name, own in _encoder_names(stored).items()}
    return filled(read_shape(folder), weights, str(folder))


def check_encoder_names(folder: Path, shape: EncoderShape) -> None:
    """Check that the names and shapes of the folder's weights match the encoder's shape.

    Only safetensors files tell without being read.

    Raises:
        ArtifactError: as `load_encoder_weights`.
    """
    stored = {name: t for path in weight_paths(folder) for name, t in read_header(path).items()}
    if stored:
        names = _encoder_names(stored)
        shapes = {own: tuple(stored[name]["shape"]) for name, own in names.items()}
        _check_shapes(_empty(shape), shapes, str(folder))


def _encoder_names(stored: Iterable[str]) -> dict[str, str]:
    """Map each stored weight name to its name in the encoder. Heads and poolers are dropped, and
    the prefix of the larger model that the encoder was saved in: `bert` for masked language,
    `trunk` for embeddings.
    """
    names = {name: re.sub(r"^(trunk|bert)\.", "", name) for name in stored}
    return {n: own for n, own in names.items() if not own.startswith(("pooler.", "cls."))}


def filled(shape: EncoderShape, weights: Mapping[str, Tensor], where: str) -> NomicEncoder:
    """Build an encoder of the given shape with the given weights.

    Raises:
        ArtifactError: they are not those of the shape.
    """
    encoder = _empty(shape)
    _check_shapes(encoder, {name: tuple(value.shape) for name, value in weights.items()}, where)
    encoder.load_state_dict(dict(weights), assign=True)
    encoder.requires_grad_(True)
    return encoder


def _empty(shape: EncoderShape) -> NomicEncoder:
    with torch.device("meta"):
        return NomicEncoder(shape)


def _check_shapes(encoder: NomicEncoder, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    expected = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    missing, unexpected = sorted(expected.keys() - found), sorted(found.keys() - expected)
    other = [
        f"{name} {found[name]} for {wanted}"
        for name, wanted in expected.items()
        if name in found and found[name] != wanted
    ]
    if missing or unexpected or other:
        raise ArtifactError(
            f"the weights in {where!r} do not match its config.json: missing {len(missing)} "
            f"{missing[:10]}, unexpected {len(unexpected)} {unexpected[:10]}, of other shapes "
            f"{len(other)} {other[:10]}"
        )

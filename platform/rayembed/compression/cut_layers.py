"""Layers of a model in a folder: chosen, cut, written, and compared with what is read back."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayembed.compression.contract import CalibrationText, Compressed, Source
from rayembed.compression.matrices import shares
from rayembed.compression.prune import empty_model, save_like, write_told
from rayembed.config.settings import nearest
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.architecture import architecture_of
from rayembed.models.encoding import PROBES, encode
from rayembed.models.export import check_target, new_folder
from rayembed.models.layers import layers_of
from rayembed.models.load import load_model, saved_dtype
from rayembed.models.transformer_model import TransformerModel

if TYPE_CHECKING:
    from rayembed.compression.layers import Layers


def check_layers(way: "Layers", folder: Path) -> None:
    """Check by a model's files that it can be cut.

    Raises:
        ArtifactError: no model that can be loaded.
        ConfigError: it has not so many layers, or its settings cannot say which are left.
    """
    _cut(way, empty_model(folder))


def cut_layers(way: "Layers", source: Source, output: Path) -> Compressed:
    """Write the model with fewer layers; raises as `Compression.compress`."""
    check_target(output)
    model = load_model(source.folder, dtype=saved_dtype(source.folder))
    before = shares(model, ())
    _cut(way, model)
    told = removed(before, shares(model, ()))
    with new_folder(output) as written:
        save_like(model, source.folder, written)
        check_same(model, written, source.texts)
        write_told(way, told, source.folder, written)
    return told


def evenly_spaced(whole: int, kept: int, fits: Callable[[int, int], bool]) -> list[int]:
    """The layers, of so many, that take the places 0 to `kept` - 1 of the smaller model.

    Args:
        fits: whether a layer can stand at a place: `fits(layer, place)`.

    Raises:
        ConfigError: no layer is left for a place.
    """
    chosen: list[int] = []
    for place in range(kept):
        ideal = place * (whole - 1) / (kept - 1) if kept > 1 else 0.0
        first = chosen[-1] + 1 if chosen else 0
        left = [layer for layer in range(first, whole - (kept - place) + 1) if fits(layer, place)]
        if not left:
            raise ConfigError(
                f"layers: {kept} of {whole} layers cannot be kept: the model's layers are of "
                f"several kinds, and none of the kind that stands at place {place} is left; take "
                "another number"
            )
        chosen.append(min(left, key=lambda layer: (abs(layer - ideal), layer)))
    return chosen


def removed(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> Compressed:
    """What was done to a model by its weights of each part, before and after."""
    left = {part: after.get(part, (0, 0))[0] for part in before}
    by_part = {part: (whole, whole - left[part]) for part, (whole, _) in before.items()}
    return Compressed(
        weights=sum(whole for whole, _ in by_part.values()),
        compressed=sum(gone for _, gone in by_part.values()),
        by_part=by_part,
    )


def check_same(model: TransformerModel, folder: Path, texts: Sequence[CalibrationText]) -> None:
    """Check that a model that was written gives the vectors of the one in memory, to the bit.

    Raises:
        ArtifactError: it does not, or it cannot be loaded.
    """
    some = [text.text for text in texts[:8]] or list(PROBES)
    written = load_model(folder, dtype=saved_dtype(folder))
    vectors, expected = (encode(one, some, role="document") for one in (written, model))
    if not np.array_equal(vectors, expected):
        raise ArtifactError(
            "the model that was written gives other vectors than the one that was cut (by up to "
            f"{float(np.abs(vectors - expected).max()):.1e}): its settings cannot say what is "
            "left of it; nothing is left of the attempt"
        )


def _cut(way: "Layers", model: TransformerModel) -> None:
    if way.part not in model.parts:
        raise ConfigError(
            f"layers.part names {way.part!r}, which the model does not have; "
            f"{nearest(way.part, model.parts)}"
        )
    architecture, part = architecture_of(model.config), model.parts[way.part]
    whole = len(layers_of([part]))

    def fits(layer: int, place: int) -> bool:
        return architecture.layer_fits(part, layer, place)

    number = way.number or max(1, round(whole * (way.share or 0)))
    if max(way.which, default=0) >= whole or (not way.which and number >= whole):
        asked = way.which or number
        raise ConfigError(
            f"layers: asked for {asked}, but the {way.part} has {whole} layers, counted from 0; "
            f"keep {whole - 1} at most"
        )
    kept = list(way.which) or evenly_spaced(whole, number, fits)
    if wrong := [layer for place, layer in enumerate(kept) if not fits(layer, place)]:
        raise ConfigError(
            f"layers.which = {kept}: layer {wrong[0]} would stand at place "
            f"{kept.index(wrong[0])}, where the model has layers of another kind; keep layers so "
            "that the kinds alternate as before"
        )
    architecture.cut_layers(part, kept)
    if way.part == "backbone":  # a setting that would cut it again
        backbone = model.config.backbone.model_copy(update={"num_layers": None})
        model.config = model.config.model_copy(update={"backbone": backbone})

"""Remove layers of a transformer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from rayembed.config.settings import nearest
from rayembed.errors import ArtifactError, ConfigError
from rayembed_extras.compression.contract import (
    CalibrationText,
    Compressed,
    Compression,
    CompressionSource,
)

if TYPE_CHECKING:
    from rayembed.models.transformer_model import TransformerModel


class Layers(Compression):
    """Compression method that keeps evenly spaced layers, from the first to the last, and removes
    the others.

    As DistilBERT starts from every other layer of BERT (arXiv 1910.01108). The vectors of a model
    that was cut are poor until it is trained again, best with the whole model as a teacher. Where
    layers are of several kinds that alternate, such as mixtures of experts, the nearest layer of
    the right kind takes each place.
    """

    is_cut: ClassVar[bool] = True

    kind: Literal["layers"] = "layers"
    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of layers to keep, rounded to a whole number."""
    number: PositiveInt | None = None
    """Number of layers to keep, instead of a share."""
    which: tuple[int, ...] = ()
    """Indices of the layers to keep, from 0, instead of a share or a number."""
    part: Literal["backbone", "encoder"] = "backbone"
    """Name of the pretrained part to cut."""

    @property
    def label(self) -> str:
        """Short name: `layers-0.5`, `layers-6`, `layers-0-5-11`."""
        kept = "-".join(map(str, self.which)) or f"{self.number or self.share:g}"
        return f"layers-{kept}" if self.part == "backbone" else f"layers-{self.part}-{kept}"

    @model_validator(mode="after")
    def _says_once(self) -> "Layers":
        said = [name for name in ("share", "number", "which") if getattr(self, name)]
        if len(said) != 1:
            raise ValueError(
                "layers: set exactly one of share, number and which, not "
                f"{', '.join(said) or 'none'}; share=0.5 keeps every other layer"
            )
        if list(self.which) != sorted({*self.which}) or min(self.which, default=0) < 0:
            raise ValueError(
                f"layers.which = {list(self.which)} must be ascending layer indices, 0 or more, "
                "without repetition"
            )
        return self

    def check(self, folder: Path) -> None:
        """Check that the model has these layers and that its configuration can describe the shorter
        model.
        """
        from rayembed.models.loading.load import empty_model

        _cut(self, empty_model(folder))

    def compress(self, source: CompressionSource, output: Path) -> Compressed:
        """Write the model with fewer layers."""
        from rayembed.models.loading.load import load_model, saved_dtype
        from rayembed.models.loading.saved_prompts import saved_instructions
        from rayembed.models.saving.export import check_target, new_folder
        from rayembed_extras.compression.matrices import statistics_of, statistics_of_cut

        check_target(output)
        model = load_model(source.folder, dtype=saved_dtype(source.folder))
        before = statistics_of(model, ())
        _cut(self, model)
        made = statistics_of_cut(before, model)
        with new_folder(output) as written:
            model.save(written, instructions=saved_instructions(source.folder, model.config))
            _check_same(model, written, source.texts)
            made.write(self, source.folder, written)
        return made


def evenly_spaced(whole: int, kept: int, fits: Callable[[int, int], bool]) -> list[int]:
    """Return the indices of `kept` layers that are evenly spaced from the first to the
    last.

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
                f"several kinds, and no layer of the kind needed at position {place} is left; "
                "keep another number of layers"
            )
        chosen.append(min(left, key=lambda layer: (abs(layer - ideal), layer)))
    return chosen


def _check_same(model: "TransformerModel", folder: Path, texts: Sequence[CalibrationText]) -> None:
    """Check that the saved model, loaded again, gives exactly the vectors of the model in
    memory.

    Raises:
        ArtifactError: it does not, or it cannot be loaded.
    """
    import numpy as np

    from rayembed.models.loading.load import load_model, saved_dtype
    from rayembed.models.passes.encoding import PROBES, encode

    some = [text.text for text in texts[:8]] or list(PROBES)
    written = load_model(folder, dtype=saved_dtype(folder))
    vectors, expected = (encode(one, some, role="document") for one in (written, model))
    if not np.array_equal(vectors, expected):
        raise ArtifactError(
            "the saved model's vectors differ from the vectors of the cut model in memory (by up "
            f"to {float(np.abs(vectors - expected).max()):.1e}): the model's settings cannot "
            "describe the remaining layers; the output was removed"
        )


def _cut(way: Layers, model: "TransformerModel") -> None:
    from rayembed.models.architecture import architecture_of
    from rayembed.models.layers import layers_of
    from rayembed_extras.compression.cutting import keep_layers

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
            f"layers: asked for {asked}, but the {way.part} has {whole} layers, counted from 0, "
            f"and at least one must be removed; keep {whole - 1} at most"
        )
    kept = list(way.which) or evenly_spaced(whole, number, fits)
    if wrong := [layer for place, layer in enumerate(kept) if not fits(layer, place)]:
        raise ConfigError(
            f"layers.which = {kept}: layer {wrong[0]} would move to position "
            f"{kept.index(wrong[0])}, where the model has layers of another kind; keep layers so "
            "that the kinds alternate as before"
        )
    if not architecture.cut_layers(part, kept):
        keep_layers(part, kept)
    if way.part == "backbone":  # a setting that would cut it again
        backbone = model.config.backbone.model_copy(update={"num_layers": None})
        model.config = model.config.model_copy(update={"backbone": backbone})

"""Fewer layers: some of a transformer's layers are kept, the others are gone."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from rayembed.compression.contract import Compressed, Compression, Source


class Layers(Compression):
    """Fewer layers, those that are kept evenly spaced from the first to the last.

    As DistilBERT starts from every other layer of BERT (arXiv 1910.01108). The vectors of a model
    that was cut are poor until it is trained again, best with the whole model as a teacher. Where
    layers are of several kinds that alternate, such as mixtures of experts, the nearest layer of
    the right kind takes each place.
    """

    is_cut: ClassVar[bool] = True

    kind: Literal["layers"] = "layers"
    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the layers that is kept, rounded to a whole number."""
    number: PositiveInt | None = None
    """Number of layers that is kept, in place of a share."""
    which: tuple[int, ...] = ()
    """The layers that are kept, counted from 0, in place of a share or a number."""
    part: Literal["backbone", "encoder"] = "backbone"
    """The pretrained part that is cut."""

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
                f"layers: name one of share, number and which, not {', '.join(said) or 'none'}; "
                "share=0.5 keeps every other layer"
            )
        if list(self.which) != sorted({*self.which}) or min(self.which, default=0) < 0:
            raise ValueError(
                f"layers.which = {list(self.which)} must rise from layer to layer, from 0 on"
            )
        return self

    def check(self, folder: Path) -> None:
        """Check that the model has such layers and that its settings can say what is left."""
        from rayembed.compression.cut_layers import check_layers

        check_layers(self, folder)

    def compress(self, source: Source, output: Path) -> Compressed:
        """Write the model with fewer layers."""
        from rayembed.compression.cut_layers import cut_layers

        return cut_layers(self, source, output)

"""Base class of the compression methods, and the types of their inputs and results.

A way is one file of `compression/`: its settings, and a function from a model's folder to another.

Importing this module or that of a way loads no torch, for settings are read where there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import PositiveInt

from rayembed.config.settings import Settings
from rayembed.config.types import Role


class CalibrationText(NamedTuple):
    """A text with the role and the instruction with which the model will embed it."""

    text: str
    role: Role = "document"
    instruction: str | None = None
    """None: the model's default of the role; "": none at all."""


@dataclass(frozen=True)
class CompressionSource:
    """The model to compress, with calibration texts."""

    folder: Path
    """Folder that `models.load.load_model` reads."""
    texts: Sequence[CalibrationText] = ()
    """Calibration texts, from the model's training data if known; may be empty for a method that
    does not need them."""


@dataclass(frozen=True)
class Compressed:
    """Statistics of a compression: how many weights of each part were changed."""

    by_part: dict[str, tuple[int, int]]
    """Weights before, and those of them that were pruned (their matrix, not its zeros), quantised
    or removed, of each part of the model, such as `embeddings`, `attention`, `mlp`, `experts`,
    `norms` and `head`, so that what was left alone is seen."""
    matrices: tuple[str, ...] = ()
    """Names of the pruned matrices among the saved model's parameters; their zeros are the mask
    that a later training can keep."""

    @property
    def weights(self) -> int:
        """Number of weights before compression, including embeddings and heads."""
        return sum(whole for whole, _ in self.by_part.values())

    @property
    def compressed(self) -> int:
        """Number of weights that were pruned, quantised or removed."""
        return sum(changed for _, changed in self.by_part.values())

    def write(self, way: "Compression", source: Path, folder: Path, **more: Any) -> None:
        """Write compression.json; the source model's own compression record moves to its field
        `before`.

        It names the matrices too that were pruned in the source.

        Args:
            more: further entries.
        """
        from rayembed.models.saving.export import read_compression, write_compression

        before = read_compression(source)
        earlier = () if before is None or not self.matrices else before.get("matrices", ())
        record = {
            **({} if before is None else {"before": before}),
            "settings": way.model_dump(mode="json"),
            "weights": self.weights,
            "compressed": self.compressed,
            "by_part": self.by_part,
            "matrices": list(dict.fromkeys([*self.matrices, *earlier])),
        }
        write_compression(folder, {**record, **more})


class Compression(Settings):
    """Settings of one compression method, and the method itself, which writes a
    new model folder.
    """

    kind: str

    needs_texts: ClassVar[bool] = False
    """Whether the method needs calibration texts."""
    is_cut: ClassVar[bool] = False
    """Whether the result is a complete smaller model that can be trained further."""

    @property
    def fewest_texts(self) -> int:
        """Minimum number of calibration texts that the method needs."""
        return int(self.needs_texts)

    @property
    def label(self) -> str:
        """Short name of the variant and of its folder: letters, digits, `-` and `.`."""
        return self.kind

    def check(self, folder: Path) -> None:
        """Check, from the model's files without weights, that the method can compress the
        model.

        Raises:
            ConfigError: it cannot, with the reason; or a package is missing, with its command.
            ArtifactError: no model that can be loaded.
        """
        raise TypeError(f"{type(self).__name__} does not implement check")

    def compress(self, source: CompressionSource, output: Path) -> Compressed:
        """Write the compressed model into the folder `output`, so that `load_model` can
        read it.

        The folder appears whole or not at all.

        Raises:
            ConfigError: as `check`; or too few calibration texts.
            ArtifactError: the model is damaged, or the result is not what was asked.
        """
        raise TypeError(f"{type(self).__name__} does not implement compress")


class Calibrated(Compression):
    """Base class of compression methods that need calibration texts."""

    needs_texts: ClassVar[bool] = True

    minimum_texts: PositiveInt = 128
    """Minimum calibration texts; with fewer the compression is refused. They should be of the kind
    that the model embeds, queries and documents."""

    @property
    def fewest_texts(self) -> int:
        """Minimum number of calibration texts, as set by `minimum_texts`."""
        return self.minimum_texts

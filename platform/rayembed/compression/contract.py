"""Base class of the ways to compress a model: what each gets, and what it gives back.

Importing this module or that of a way loads no torch, for settings are read where there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rayembed.config.compression import CompressionConfig
from rayembed.config.types import Role


class CalibrationText(NamedTuple):
    """A text as the model meets it in use."""

    text: str
    role: Role = "document"
    instruction: str | None = None
    """None: the model's default of the role; "": none at all."""


@dataclass(frozen=True)
class Source:
    """The model that is compressed."""

    folder: Path
    """One that `models.load.load_model` reads."""
    texts: Sequence[CalibrationText] = ()
    """Calibration texts, of the model's training data if these are known; a way that does not need
    them may get none."""


@dataclass(frozen=True)
class Compressed:
    """What a way did to a model."""

    weights: int
    """Weights of the model before: all parameters, embeddings and heads included."""
    compressed: int
    """Weights of those that were pruned (their matrix, not its zeros), quantised or removed."""
    by_part: dict[str, tuple[int, int]]
    """Both numbers of each part of the model, such as `embeddings`, `attention`, `mlp`, `experts`,
    `norms` and `head`, so that what was left alone is seen."""
    matrices: tuple[str, ...] = ()
    """Names of the pruned matrices among the saved model's parameters; their zeros are the mask
    that a later training can keep."""


class Compression(CompressionConfig):
    """A way to compress a model."""

    def check(self, folder: Path) -> None:
        """Check by the files of a model, without its weights, that this way can take it.

        Raises:
            ConfigError: it cannot, with the reason; or a package is missing, with its command.
            ArtifactError: no model that can be loaded.
        """
        raise TypeError(f"{type(self).__name__} checks no model")

    def compress(self, source: Source, output: Path) -> Compressed:
        """Write the compressed model into the folder `output`, which `load_model` reads.

        The folder appears whole or not at all.

        Raises:
            ConfigError: as `check`; or too few calibration texts.
            ArtifactError: the model is damaged, or the result is not what was asked.
        """
        raise TypeError(f"{type(self).__name__} compresses no model")

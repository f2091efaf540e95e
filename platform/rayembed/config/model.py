"""Setting `model` of a run: one of the architectures' settings classes."""

from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.table import SettingsTable

ARCHITECTURES = SettingsTable(
    "rayembed.architectures",
    ArchitectureConfig,
    (
        "rayembed.models.nvembed.config:NVEmbedConfig",
        "rayembed.models.biencoder.config:BiEncoderConfig",
        "rayembed.models.causal2vec.config:Causal2VecConfig",
        "rayembed.models.cde.config:CDEConfig",
        "rayembed.models.nomic_moe.config:NomicMoeConfig",
    ),
)
"""Table of all architectures' settings; each class names its code (`architecture`)."""


@cache
def architecture_classes() -> tuple[type[ArchitectureConfig], ...]:
    """Settings class of every architecture, including those that other packages add."""
    classes: Any = ARCHITECTURES.classes()  # of the table's base
    return tuple(classes.values())


if TYPE_CHECKING:
    ModelConfig = ArchitectureConfig
else:
    ModelConfig = ARCHITECTURES.union()


def without_place(reference: str) -> str:
    """Convert a model reference to its publishable form, in which a local path is reduced to its
    last part.
    """
    return reference if ":/" in reference else PurePath(reference).name

"""Common base of models around a pretrained transformer: their parts, and saving them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rayembed.config.model import ModelConfig
from rayembed.models.contract import EmbeddingModel, PromptTokenizer


class TransformerModel(EmbeddingModel):
    """A pretrained backbone, further parts and a tokenizer; saved as one folder."""

    config: ModelConfig
    backbone: Any
    """A transformers model, possibly with adapters."""
    tokenizer: PromptTokenizer

    @property
    def parts(self) -> dict[str, Any]:
        """Pretrained models by the names of their settings, the backbone first."""
        return {"backbone": self.backbone}

    @property
    def head(self) -> nn.Module:
        """Layers trained from random weights beside the pretrained parts."""
        raise TypeError(f"{type(self).__name__} has no head")

    @property
    def trained_parts(self) -> list[Any]:
        """The `parts` that are trained or have trained adapters."""
        return list(self.parts.values())

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to a pretrained part or an adapter."""
        path = name.split(".")
        return any(part in path for part in self.parts)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the layers of trained parts in the backward pass, while in training."""
        for part in self.trained_parts:
            part.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Save the model with merged adapters to a folder, atomically.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.
        """
        from rayembed.models.export import save_model

        save_model(self, folder, instructions=instructions)

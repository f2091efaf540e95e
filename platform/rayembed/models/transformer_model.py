"""Common bases of models around a pretrained transformer: their parts, and saving them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.model import ModelConfig
from rayembed.models.contract import EmbeddingModel, EmbedOutput, PromptTokenizer
from rayembed.models.pooling import pooled_width


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
    def part_tokenizers(self) -> dict[str, Any]:
        """Tokenizers of transformers to be saved with the parts, by part."""
        return {"backbone": self.tokenizer.pretrained}

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


class PooledTransformer(TransformerModel):
    """Hidden states of a backbone, pooled and normalised in float32."""

    def __init__(
        self,
        config: ModelConfig,
        backbone: Any,
        pooling: nn.Module,
        tokenizer: PromptTokenizer,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.pooling = pooling
        self.tokenizer = tokenizer
        self.dimensions = (pooled_width(pooling, int(backbone.config.hidden_size)),)

    @property
    def head(self) -> nn.Module:
        """The pooling layer."""
        return self.pooling

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Unit vectors (B, D) of a collated micro-batch; takes no context."""
        states = self.backbone(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        pooled = self.pooling(states, batch["attention_mask"], batch["pool_mask"])
        return EmbedOutput(functional.normalize(pooled, dim=-1))

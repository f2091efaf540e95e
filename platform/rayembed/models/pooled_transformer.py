"""A transformer with a pooling layer on top: what NV-Embed and the bi-encoder have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.model import BiEncoderConfig, NVEmbedConfig
from rayembed.models.contract import EmbeddingModel, EmbedOutput
from rayembed.models.tokens import BiEncoderTokenizer, NVEmbedTokenizer


class PooledTransformer(EmbeddingModel):
    """Hidden states of a backbone, pooled and normalised in float32."""

    def __init__(
        self,
        config: NVEmbedConfig | BiEncoderConfig,
        backbone: Any,
        pooling: nn.Module,
        tokenizer: NVEmbedTokenizer | BiEncoderTokenizer,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.pooling = pooling
        self.tokenizer: NVEmbedTokenizer | BiEncoderTokenizer = tokenizer
        projections = config.projections if isinstance(config, BiEncoderConfig) else ()
        width = projections[-1].width if projections else backbone.config.hidden_size
        self.dimensions = (int(width),)

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Unit vectors (B, D) of a collated micro-batch; takes no context."""
        states = self.backbone(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        pooled = self.pooling(states, batch["attention_mask"], batch["pool_mask"])
        return EmbedOutput(functional.normalize(pooled, dim=-1))

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter is the backbone's or an adapter's."""
        return "backbone" in name.split(".")

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the backbone's layers in the backward pass, while the model is in training."""
        self.backbone.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write the model, adapters merged, to a folder that appears whole or not at all.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.
        """
        from rayembed.models.export import save_model

        save_model(self, folder, instructions=instructions)

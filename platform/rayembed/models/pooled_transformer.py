"""A transformer with a pooling layer: common base of NV-Embed and the bi-encoder."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.model import BiEncoderConfig, NVEmbedConfig
from rayembed.models.contract import EmbedOutput
from rayembed.models.tokens import BiEncoderTokenizer, NVEmbedTokenizer
from rayembed.models.transformer_model import TransformerModel


class PooledTransformer(TransformerModel):
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

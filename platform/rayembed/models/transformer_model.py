"""Common bases of models around a pretrained transformer: their parts, and saving them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rayembed.config.model import ModelConfig
from rayembed.models.backbones import first_position
from rayembed.models.contract import (
    EmbeddingModel,
    EmbedOutput,
    PromptTokenizer,
)
from rayembed.models.encoding import check_vectors
from rayembed.models.layers import compile_layers
from rayembed.models.packed import Packed, counted_positions, packed_states
from rayembed.models.pooling import Layout, pooled_width
from rayembed.models.unpadded import why_part_padded


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

    def why_padded(self) -> str | None:
        """Why texts must be padded; None where all parts read them packed."""
        reasons = (why_part_padded(name, part) for name, part in self.parts.items())
        return next((reason for reason in reasons if reason is not None), None)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the layers of all parts from now on, see `layers.compile_layers`."""
        compile_layers(self.parts.values(), backend)

    def check_passes(self, what: str) -> None:
        """Raise unless a pass gives finite numbers, which is tried before the model is saved.

        By its vectors of short texts; a model that gives no vectors has a method of its own.

        Args:
            what: the model, for the message.

        Raises:
            ArtifactError: they are not; see `encoding.check_vectors`.
        """
        check_vectors(self, what)

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Save the model with merged adapters to a folder, atomically.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.

        Raises:
            ArtifactError: as `save_model`; nothing is written.
        """
        from rayembed.models.export import save_model

        save_model(self, folder, instructions=instructions)


class PooledTransformer(TransformerModel):
    """Hidden states of a backbone, pooled and normalised in float32."""

    takes_packed = True

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
        self._first_position = first_position(backbone)

    @property
    def head(self) -> nn.Module:
        """The pooling layer."""
        return self.pooling

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Unit vectors (B, D) of a collated micro-batch; takes no context."""
        layout: Layout
        ids, packed = batch["input_ids"], Packed.of(batch)
        if packed is None:
            layout = batch["attention_mask"]
            states = self.backbone(input_ids=ids, attention_mask=layout).last_hidden_state
        else:
            layout = packed
            positions = counted_positions(ids, batch["position_ids"], self._first_position)
            states = packed_states(self.backbone, packed, positions, input_ids=ids)
        pooled = self.pooling(states, layout, batch["pool_mask"])
        if pooled.shape[1] > self.dimensions[0]:
            pooled = pooled[:, : self.dimensions[0]]
        return EmbedOutput(functional.normalize(pooled, dim=-1))

"""The cross-encoder: its tokens, its forward pass, how it is built."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crossrank.config import CrossEncoderConfig
from rayembed.errors import ArtifactError
from rayembed.models.architecture import Architecture, Parts
from rayembed.models.contract import PromptTokenizer, Tokens
from rayembed.models.tokens import PrefixTokenizer, pretrained_tokenizer
from rayembed.models.transformer_model import TransformerModel


class PairTokenizer(PrefixTokenizer):
    """Tokenizer of pairs: query, separator, document."""

    def of_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Tokens]:
        """Tokens of each pair, cut to the maximum length of a document."""
        length = self.max_lengths["document"]
        queries, documents = zip(*pairs, strict=True)
        found = self.pretrained(
            list(queries), list(documents), truncation=True, max_length=length, padding=False
        )
        return [
            {"input_ids": np.array(ids, np.int32), "pool_mask": np.ones(len(ids), bool)}
            for ids in found["input_ids"]
        ]


class CrossEncoder(TransformerModel):
    """A score for each pair, from the state of its first token."""

    def __init__(
        self, config: CrossEncoderConfig, backbone: Any, score: nn.Module, tokenizer: PairTokenizer
    ) -> None:
        super().__init__()
        self.config, self.backbone, self.score = config, backbone, score
        self.tokenizer = tokenizer
        self.dimensions = (1,)

    @property
    def head(self) -> nn.Module:
        """The layer that scores."""
        return self.score

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> Tensor:
        """(B,) float32 scores of a collated micro-batch of pairs."""
        states = self.backbone(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        return self.score(states[:, 0]).squeeze(1).float()

    @torch.inference_mode()
    def check_passes(self, what: str) -> None:
        """Raise unless the score of a short pair is finite."""
        tokens = self.tokenizer.of_pairs([("what is Paris", "the capital of France")])
        score = self(self.tokenizer.collate(tokens))
        if not score.isfinite().all():
            raise ArtifactError(f"{what}: the score of a short pair is {score.item()}")


class CrossEncoderArchitecture(Architecture):
    """From settings to the model, which is trained for its own objective."""

    objective = "crossrank.objective:PAIRS"

    def build_head(self, config: CrossEncoderConfig, shapes: Mapping[str, Any]) -> nn.Module:
        """A linear layer to one number."""
        return nn.Linear(int(shapes["backbone"].hidden_size), 1)

    def tokenizer(self, config: CrossEncoderConfig, folders: Mapping[str, Path]) -> PairTokenizer:
        """Tokenizer of pairs."""
        return PairTokenizer(pretrained_tokenizer(folders["backbone"]), config)

    def assemble(
        self, config: CrossEncoderConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> CrossEncoder:
        """The model around its encoder."""
        assert isinstance(tokenizer, PairTokenizer)
        return CrossEncoder(config, parts["backbone"], head, tokenizer)


CROSS_ENCODER = CrossEncoderArchitecture()

"""A small model with every part of the contract: dropout, shared context, summed statistics."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayembed.config.types import Role
from rayembed.models.contract import EmbeddingModel, EmbedOutput, Tokens


class ToyTokenizer:
    """One token a character; queries and documents differ in their first token."""

    def __call__(
        self, texts: Sequence[str], role: Role, instructions: Sequence[str] | None = None
    ) -> list[Tokens]:
        first = 1 if role == "query" else 2
        return [
            {"input_ids": np.array([first, *(3 + ord(c) % 29 for c in text)], dtype=np.int32)}
            for text in texts
        ]

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        longest = max(len(t["input_ids"]) for t in tokens)
        ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
        for row, t in enumerate(tokens):
            ids[row, : len(t["input_ids"])] = torch.from_numpy(t["input_ids"])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class ToyModel(EmbeddingModel):
    """Mean of token vectors, dropout, two layers; optionally a context and router statistics."""

    def __init__(
        self, *, dropout: float = 0.0, context: bool = False, experts: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(32, 8)
            self.hidden = nn.Linear(8, 8)
            self.out = nn.Linear(8, 8)
            self.first = nn.Linear(8, 8) if context else None
            self.router = nn.Linear(8, experts) if experts else None
        self.dropout = nn.Dropout(dropout)
        self.uses_context = context
        self.tokenizer = ToyTokenizer()
        self.dimensions = (8,)

    def _mean(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return (self.tokens(batch["input_ids"]) * mask).sum(1) / mask.sum(1)

    def embed_context(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.first(self.dropout(self._mean(batch))))

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        x = torch.tanh(self.hidden(self.dropout(self._mean(batch))))
        if self.uses_context:
            weights = torch.softmax(x @ context.T, dim=-1)
            x = x + weights @ context
        statistics = None
        if self.router is not None:
            occurrences = batch.get("occurrences", torch.ones(len(x))).to(x.dtype)
            loads = occurrences @ torch.softmax(self.router(x), dim=-1)
            statistics = torch.cat([loads, occurrences.sum()[None]])
        return EmbedOutput(F.normalize(self.out(x).float(), dim=-1), statistics)

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        share = statistics[:-1] / statistics[-1]
        return 0.5 * len(share) * (share**2).sum()

    def backbone_parameter(self, name: str) -> bool:
        return not name.startswith("out.")

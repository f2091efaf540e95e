"""Tokens of Nomic Embed v2; in training, texts are padded to full length if the experts' balance
loss counts padding.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rayembed.config.types import Role
from rayembed.models.contract import Tokens
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.tokens import PrefixTokenizer


class NomicMoeTokenizer(PrefixTokenizer):
    """Tokenizer that puts a prefix before each text, with the model's own special tokens; all
    tokens are pooled.

    An instruction, such as `clustering: `, stands in place of the role's prefix. Where padding
    counts for the experts, tokens in training are those of the full length, padding included;
    vectors are the same without it.
    """

    def __init__(self, pretrained: Any, config: NomicMoeConfig) -> None:
        super().__init__(pretrained, config)
        self._counts_padding = config.experts is not None and config.experts.balance.count_padding
        self._pads = False

    def in_training(self) -> "NomicMoeTokenizer":
        """Return the tokenizer for training; see `TrainingTokenizer`."""
        changed = copy.copy(self)
        changed._pads = self._counts_padding
        return changed

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokenise each text with its literal prompt before it; see `PromptTokenizer`."""
        made = super().with_prompts(texts, prompts, role, allow_empty=allow_empty)
        if not self._pads:
            return made
        return [self._padded(one, self.max_lengths[role]) for one in made]

    def _padded(self, tokens: Tokens, length: int) -> Tokens:
        missing = length - len(tokens["input_ids"])
        return {
            "input_ids": np.pad(tokens["input_ids"], (0, missing), constant_values=self.pad_id),
            "pool_mask": np.pad(tokens["pool_mask"], (0, missing)),
        }

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate `input_ids`, `attention_mask` and `pool_mask` like other models, and `counted`,
        which marks the tokens that experts process.

        `counted` (B, longest) int64 is zero where experts see nothing.
        """
        batch = super().collate(tokens)
        counted = batch["attention_mask"]
        return {**batch, "attention_mask": batch["pool_mask"].long(), "counted": counted}

"""Tokenise pairs of query and document as one text, and cut the longer of the two."""

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from rayembed.config.types import Role
from rayembed.errors import DataError
from rayembed.models.contract import Tokens
from rayembed.models.tokens import PrefixTokenizer, padded
from rayembed_extras.reranking.settings import CrossEncoderConfig


class PairTokenizer(PrefixTokenizer):
    """Tokenizer of pairs, by the pretrained tokenizer's own template of two texts. Picklable.

    A pair that is too long loses tokens at the end of its longer text, one after the other, as in
    transformers (`longest_first`), sentence-transformers and Text Embeddings Inference.
    """

    def __init__(self, pretrained: Any, config: CrossEncoderConfig) -> None:
        super().__init__(pretrained, config)
        if self.pretrained.pad_token is None:
            self.pad_id = int(self.pretrained.eos_token_id or 0)
        # Saved with the tokenizer, by which sentence-transformers cuts pairs.
        self.pretrained.model_max_length = config.document_max_length
        self._has_types = "token_type_ids" in self.pretrained.model_input_names
        self._type_of_padding = int(self.pretrained.pad_token_type_id or 0)
        self._backend: Any = copy.deepcopy(self.pretrained.backend_tokenizer)

    def of_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None = None
    ) -> list[Tokens]:
        """Tokenise pairs of query and document.

        Args:
            max_length: tokens of a pair, special ones included; None: the model's.

        Returns:
            For each pair `input_ids` (T,) int32, `token_type_ids` (T,) int32 where the model has
            them, and `cut`, (1,) int32: how many tokens the pair has lost.
        """
        length = max_length or self.max_lengths["document"]
        self._backend.enable_truncation(length, strategy="longest_first", direction="right")
        found: list[Tokens] = []
        for encoding in self._backend.encode_batch(list(pairs)):
            tokens = {"input_ids": np.array(encoding.ids, np.int32)}
            if self._has_types:
                tokens["token_type_ids"] = np.array(encoding.type_ids, np.int32)
            lost = sum(
                len(more.ids) - sum(more.special_tokens_mask) for more in encoding.overflowing
            )
            tokens["cut"] = np.array([lost], np.int32)
            found.append(tokens)
        return found

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate pairs to `input_ids`, `attention_mask` and, where the model has them,
        `token_type_ids`, each (B, longest) int64, with padding to the right.
        """
        ids, mask = padded([one["input_ids"] for one in tokens], self.pad_id)
        batch = {"input_ids": ids, "attention_mask": mask}
        if self._has_types:
            types, _ = padded([one["token_type_ids"] for one in tokens], self._type_of_padding)
            batch["token_type_ids"] = types
        return batch

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> NoReturn:
        """Raise, because a cross-encoder reads pairs.

        Raises:
            DataError: always; it says what the model is for.
        """
        raise DataError(
            "this model is a cross-encoder: it scores pairs of query and document and embeds no "
            "texts. Use it as a reranker (rayembed evaluate --reranker, or mining.rescoring), and "
            "an embedding model for vectors"
        )


def cut_share(tokens: Sequence[Tokens]) -> float:
    """Share of the pairs that were longer than the model reads."""
    return sum(bool(one["cut"][0]) for one in tokens) / len(tokens)

"""Tokens of Causal2Vec: the LLM's sequence with placeholders for Contextual tokens, and the
encoder's tokens.

Every piece (template, instruction, text) is tokenised by itself, so that its tokens depend neither
on where the Contextual token stands nor on whether there is one.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayembed.config.instructions import instruction_with_examples
from rayembed.config.types import Role
from rayembed.errors import ConfigError
from rayembed.models.attention.packed import joined, pack
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.contract import Tokens
from rayembed.models.tokens import (
    PaddingSide,
    SpecialIds,
    TextTokenizer,
    budget_exceeded,
    padded,
    special_layout,
    without_settings,
    without_tokens,
)


class Causal2VecTokenizer:
    """Tokenizer of `BOS, prompt_start, instruction, Contextual tokens, text, prompt_end, EOS`;
    picklable.

    BOS is what the LLM's own tokenizer puts before a text, if it does. The encoder's tokens are
    those of the text alone.
    """

    def __init__(
        self,
        pretrained: Any,
        encoder: TextTokenizer | None,
        config: Causal2VecConfig,
        special: SpecialIds,
    ) -> None:
        self.pretrained = without_settings(pretrained)
        self.encoder = encoder
        self.pad_id = special.pad
        self._lengths = config.max_lengths
        self._config = config
        begin, _ = special_layout(self.pretrained.backend_tokenizer)
        start, end = self._ids([config.prompt_start, config.prompt_end])
        self._prefix = [*begin, *start]
        self._suffix = [*end, special.eos]
        for role, length in self.max_lengths.items():
            if self.budget(role) <= 0:
                raise ConfigError(
                    f"{role}_max_length is {length}, but special tokens, prompt_start, prompt_end "
                    f"and Contextual tokens need {length - self.budget(role)} tokens of it; set "
                    "it higher"
                )

        limit = 0 if config.examples is None else config.examples.max_tokens
        if limit >= self.budget("query"):
            raise ConfigError(
                f"examples.max_tokens is {limit}, but query_max_length {config.query_max_length} "
                f"has room for {self.budget('query')} tokens, the query included; lower "
                "examples.max_tokens or raise query_max_length"
            )

    @property
    def max_lengths(self) -> dict[Role, int]:
        """Maximum tokens of the LLM's sequence for queries and for documents. A lower limit also
        shortens the encoder's input; a higher one does not lengthen it.
        """
        return self._lengths

    @max_lengths.setter
    def max_lengths(self, lengths: dict[Role, int]) -> None:
        self._lengths = lengths
        if self.encoder is None or self._config.encoder is None:
            return
        own = self._config.max_lengths
        limit = self._config.encoder.max_length
        # A copy: another tokenizer may hold the same one.
        self.encoder = copy.copy(self.encoder)
        self.encoder.max_lengths = {
            role: min(limit, length) if length < own[role] else limit
            for role, length in lengths.items()
        }

    @property
    def max_examples(self) -> int:
        """Maximum in-context examples before a query in training."""
        return 0 if self._config.examples is None else self._config.examples.max_examples

    def instruct(self, instruction: str, examples: Sequence[tuple[str, str]]) -> str:
        """Prepend example pairs (query, positive) to the instruction, as many as the token budget
        allows.

        Each text is cut to its own limit first.
        """
        limits = self._config.examples
        if limits is None or not examples:
            return instruction
        queries = self._cut([query for query, _ in examples], limits.query_tokens)
        positives = self._cut([positive for _, positive in examples], limits.response_tokens)
        made, template = instruction, self._config.instruction_template
        pairs = list(zip(queries, positives, strict=True))
        for count in range(1, len(pairs) + 1):
            longer = instruction_with_examples(template, instruction, pairs[:count])
            if self.num_prompt_tokens(self.prompt(longer)) > limits.max_tokens:
                break
            made = longer
        return made

    def prompt(self, instruction: str, role: Role = "query") -> str:
        """Return the literal prompt that this instruction puts before a text in either role; empty
        without an instruction.
        """
        return self._config.prompt(instruction, role)

    def budget(self, role: Role) -> int:
        """Number of tokens that prompt and text may have together in this role."""
        taken = len(self._prefix) + self._config.contextual_tokens + len(self._suffix)
        return self.max_lengths[role] - taken

    def num_prompt_tokens(self, prompt: str) -> int:
        """Number of tokens that a literal prompt takes of the `budget`."""
        return len(self._ids([prompt])[0])

    def __call__(
        self,
        texts: Sequence[str],
        role: Role,
        instructions: Sequence[str] | None = None,
        *,
        allow_empty: bool = False,
    ) -> list[Tokens]:
        """Tokenise texts in their role; see `Tokenizer`."""
        prompts = [self.prompt(i) for i in instructions] if instructions else [""] * len(texts)
        return self.with_prompts(texts, prompts, role, allow_empty=allow_empty)

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokenise each text with its literal prompt before it.

        `input_ids` (T,) int32 has the padding's id where Contextual tokens stand, which
        `contextual_mask` (T,) bool marks; `encoder_ids` (S,) int32 is there if there is an encoder.

        Raises:
            DataError: a text has no token of its own, or its prompt leaves no room for it.
        """
        if not texts:
            return []
        distinct = list(dict.fromkeys(prompts))
        ids_of = dict(zip(distinct, self._ids(distinct), strict=True))
        tokens = [
            self._lay_out(own, text, ids_of[prompt], prompt, role, allow_empty)
            for own, text, prompt in zip(self._ids(texts), texts, prompts, strict=True)
        ]
        if self.encoder is None:
            return tokens
        # What is empty is for the LLM's tokenizer to tell: the encoder's may drop more.
        read = self.encoder.with_prompts(texts, [""] * len(texts), role, allow_empty=True)
        return [
            {**one, "encoder_ids": other["input_ids"]}
            for one, other in zip(tokens, read, strict=True)
        ]

    def _lay_out(
        self, own: list[int], text: str, prompt_ids: list[int], prompt: str, role: Role, empty: bool
    ) -> Tokens:
        if not empty and (not own or not text.strip()):
            raise without_tokens(text, role)
        left = self.budget(role) - len(prompt_ids)
        if left < min(len(own), 1) or left < 0:
            raise budget_exceeded(text, prompt, len(prompt_ids), role, self.max_lengths[role])
        num = self._config.contextual_tokens
        behind = self._config.position == "after_instruction"
        first = len(self._prefix) + (len(prompt_ids) if behind else 0)
        around = [*self._prefix, *prompt_ids, *own[: max(left, 0)], *self._suffix]
        ids = np.array([*around[:first], *[self.pad_id] * num, *around[first:]], dtype=np.int32)
        contextual = np.zeros(len(ids), dtype=bool)
        contextual[first : first + num] = True
        return {"input_ids": ids, "contextual_mask": contextual}

    def collate(
        self, tokens: Sequence[Tokens], *, padding_side: PaddingSide = "right"
    ) -> dict[str, Tensor]:
        """Collate a padded micro-batch, with the LLM's and the encoder's tokens.

        `input_ids` and `attention_mask` int64 and `contextual_mask` bool, each (B, longest).
        With an encoder `encoder_ids` and `encoder_mask` int64 (B, longest there), or, of tokens
        that it has read, `encoder_output` (B, n, k) float32.

        Args:
            padding_side: of the LLM's sequences; the encoder's are always padded right, because
                encoders have learnt their positions.
        """
        ids, mask = padded([one["input_ids"] for one in tokens], self.pad_id, padding_side)
        places, _ = padded([one["contextual_mask"] for one in tokens], False, padding_side)
        batch = {"input_ids": ids, "attention_mask": mask, "contextual_mask": places.bool()}
        if "encoder_output" in tokens[0]:
            batch["encoder_output"] = _outputs(tokens)
        elif self.encoder is not None:
            batch |= self.collate_for_encoder(tokens)
        return batch

    def pack(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate a packed micro-batch, with the LLM's and the encoder's tokens.

        `input_ids` int64 and `contextual_mask` bool, each (T,), with the entries of `packed.pack`.
        With an encoder `encoder_ids` int64 (S,) and those entries with `encoder_` before their
        names, or `encoder_output` as in `collate`.
        """
        rows = [one["input_ids"] for one in tokens]
        places = joined([one["contextual_mask"] for one in tokens]).bool()
        batch = {"input_ids": joined(rows), "contextual_mask": places, **pack(rows)}
        if "encoder_output" in tokens[0]:
            batch["encoder_output"] = _outputs(tokens)
        elif self.encoder is not None:
            batch |= self.pack_for_encoder(tokens)
        return batch

    def pack_for_encoder(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate only the encoder's entries of a packed micro-batch, see `pack`."""
        rows = [one["encoder_ids"] for one in tokens]
        return {"encoder_ids": joined(rows), **pack(rows, "encoder_")}

    def collate_for_encoder(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate only the encoder's entries of a padded micro-batch, see `collate`."""
        assert self.encoder is not None
        ids, mask = padded([one["encoder_ids"] for one in tokens], self.encoder.pad_id)
        return {"encoder_ids": ids, "encoder_mask": mask}

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        backend = self.pretrained.backend_tokenizer
        found: list[Any] = backend.encode_batch(list(texts), add_special_tokens=False)
        return found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(encoding.ids) for encoding in self._encoded(texts)]

    def _cut(self, texts: Sequence[str], limit: int) -> list[str]:
        """Cut each text after its first `limit` tokens, in the original string, since decoding
        tokens would change it.
        """
        return [
            text[: encoding.offsets[limit - 1][1]] if len(encoding.ids) > limit else text
            for text, encoding in zip(texts, self._encoded(texts), strict=True)
        ]


def _outputs(tokens: Sequence[Tokens]) -> Tensor:
    """Stack the encoder's output of each text to (B, n, k) float32."""
    return torch.from_numpy(np.stack([one["encoder_output"] for one in tokens]))

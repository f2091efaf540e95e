"""Count the tokens of texts as an evaluated model reads them, to find the texts that it cuts."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.config.types import Role
from rayembed.evaluation.loaded_spec import LoadedSpec
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.rayembed_spec import LiteralPrompts, RayembedSpec
from rayembed.models.loading.load import tokenizer_of
from rayembed.models.tokens import PrefixTokenizer
from rayembed.registry.registered_model import find_folder

_NO_LIMIT = 1 << 30
_AT_ONCE = 4096
"""Texts that are tokenised at once."""
_JOINED = 4
"""Tokens that a text may have in addition where it meets its prompt."""


@dataclass(frozen=True)
class TokenLengths:
    """A model's tokenizer with its length limits removed, and these limits."""

    tokenizer: Any
    """A `Tokenizer` whose limits are out of reach."""
    limits: Mapping[Role, int]
    """Tokens that are read of a text at most, special tokens and prompt included."""
    original: Any
    """The tokenizer with the model's own limits."""

    @classmethod
    def of(cls, tokenizer: Any, limits: Mapping[Role, int]) -> "TokenLengths":
        """Copy the tokenizer without its limits, for counting; the original does not change."""
        free = copy.copy(tokenizer)
        free.max_lengths = dict.fromkeys(limits, _NO_LIMIT)
        return cls(free, dict(limits), tokenizer)

    @property
    def own(self) -> Mapping[Role, int]:
        """The model's own limits, which an evaluation's settings may lower."""
        limits: Mapping[Role, int] = self.original.max_lengths
        return limits

    def tokens(self, texts: Sequence[str], role: Role, instruction: str = "") -> np.ndarray:
        """Return each text's number of tokens, (N,) int64, with prompt and special tokens; 0 for
        texts too short to need tokenising.
        """
        counts = np.zeros(len(texts), np.int64)
        room = self.limits[role] - len(self._made([""], role, instruction)[0]) - _JOINED
        # Of ASCII no tokenizer makes more tokens than there are characters.
        unsure = [
            place for place, text in enumerate(texts) if len(text) > room or not text.isascii()
        ]
        for start in range(0, len(unsure), _AT_ONCE):
            places = unsure[start : start + _AT_ONCE]
            made = self._made([texts[place] for place in places], role, instruction)
            counts[places] = list(map(len, made))
        return counts

    def _made(self, texts: Sequence[str], role: Role, instruction: str) -> list[Any]:
        made = self.tokenizer(texts, role, [instruction] * len(texts), allow_empty=True)
        return [one["input_ids"] for one in made]

    def with_prompts(self) -> "TokenLengths":
        """Return a counter that takes whole prompts as instructions, as encode specs
        contain them.
        """
        if isinstance(self.tokenizer, PrefixTokenizer):
            return TokenLengths(LiteralPrompts(self.tokenizer), self.limits, self.original)
        return self


def lengths_of(model: object) -> TokenLengths | None:
    """Create the token counter of a scored model; None for models without a length limit or loaded
    by other libraries.

    Raises:
        RayembedError: the model's folder is gone.
    """
    if isinstance(model, RayembedSpec):
        tokenizer: Any = tokenizer_of(find_folder(model.reference, model.tracking_uri))
    elif isinstance(model, LoadedSpec):
        tokenizer = model.model.tokenizer
    else:
        return None
    return TokenLengths.of(tokenizer, dict(model.max_lengths))


def tokens_in(lengths: TokenLengths, texts: Sequence[str], encode_spec: EncodeSpec) -> np.ndarray:
    """Count (N,) int64 tokens of texts with the prompt of an encode spec; see
    `TokenLengths.tokens`.
    """
    literal = lengths.with_prompts()
    return literal.tokens(texts, encode_spec.role, encode_spec.instruction)

"""NV-Embed's tokens: instruction tokens take part in attention, but are excluded from pooling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayembed.config.types import Role
from rayembed.models.contract import Tokens
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.tokens import (
    SpecialIds,
    TextTokenizer,
    budget_exceeded,
    pretrained_tokenizer,
    special_ids,
)


class NVEmbedTokenizer(TextTokenizer):
    """Tokenizer of `BOS + instruction template + text + EOS`; pooling excludes the
    instruction.

    A token is out when it ends inside the instruction: the token that joins the template's
    trailing space with the text's first word is in. With an instruction BOS is out too (as
    released); EOS always is in. Without a BOS token there is none.
    """

    def __init__(self, pretrained: Any, config: NVEmbedConfig, special: SpecialIds) -> None:
        super().__init__(
            pretrained,
            max_lengths=config.max_lengths,
            special=([] if special.bos is None else [special.bos], [special.eos], special.pad),
            pool_prompt=False,
            template=config.instruction_template,
        )


class ReleasedNVEmbedTokenizer(NVEmbedTokenizer):
    """Tokenizer that reproduces the token layout of the released code of nvidia/NV-Embed-v1 and v2
    exactly.

    `input_ids` (T,) are the first `max_length` of `BOS + tokens of (instruction + text) + EOS`: a
    text that is too long has one token more of its own and no EOS. `pool_mask` (T,) leaves out the
    first n positions, BOS among them, n being the tokens of the instruction without BOS and
    without the text; all are in where there is none. By itself the instruction ends in a lone `▁`,
    its template's trailing space. Where the text's first word takes that space into its token, n
    positions are BOS and the instruction. Where it does not (digits, ñ, CJK, Hangul, Arabic, emoji,
    white space, an empty text), the `▁` is a token of its own, the first in the pool. A template
    without a trailing space has its last token there.
    """

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokenise each text with its literal prompt before it; see `TextTokenizer`."""
        made = super().with_prompts(texts, prompts, role, allow_empty=allow_empty)
        backend = self.pretrained.backend_tokenizer
        alone = {h: len(backend.encode(h, add_special_tokens=False).ids) for h in {*prompts}}
        counted: list[Tokens] = []
        for tokens, text, prompt in zip(made, texts, prompts, strict=True):
            pool = np.arange(len(tokens["input_ids"])) >= alone[prompt]
            if not pool.any():  # the released code divides by zero
                raise budget_exceeded(text, prompt, alone[prompt], role, self.max_lengths[role])
            counted.append({**tokens, "pool_mask": pool})
        return counted

    def _whole(self, own: np.ndarray, role: Role) -> np.ndarray:
        return np.concatenate([self._prefix, own, self._suffix])[: self.max_lengths[role]]

    def budget(self, role: Role) -> int:
        """Number of tokens that prompt and text may have in this role; EOS is cut off if they fill
        it.
        """
        return self.max_lengths[role] - len(self._prefix)


def make_tokenizer(config: NVEmbedConfig, folder: Path) -> NVEmbedTokenizer:
    """Make the tokenizer in the token layout of the settings.

    Raises:
        ArtifactError: no fast tokenizer in the folder, or one without an end-of-text token.
        ConfigError: maximum lengths that leave no room for text.
    """
    released = config.token_layout == "released"
    pretrained = pretrained_tokenizer(folder, as_written=released)
    layout = ReleasedNVEmbedTokenizer if released else NVEmbedTokenizer
    return layout(pretrained, config, special_ids(pretrained, folder))
